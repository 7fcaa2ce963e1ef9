"""Errors within a stream of ``/v1/responses``, at which vLLM 0.32 cuts the connection.

Its other routes stream an event that says what is wrong.
"""

from typing import Any


def stream_refusals() -> None:
    """Have such a stream end by OpenAI's event of the type ``error`` (idempotent)."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    cls: Any = OpenAIServingResponses
    own = cls.responses_stream_generator
    if getattr(own, "streams_refusals", False):
        return

    async def responses_stream_generator(self, *rest, **options):
        from openai.types.responses import ResponseErrorEvent
        from vllm.exceptions import VLLMClientError

        count = 0
        try:
            async for event in own(self, *rest, **options):
                yield event
                count += 1
        except VLLMClientError as error:
            yield ResponseErrorEvent(
                type="error",
                code="400",
                message=str(error),
                param=getattr(error, "parameter", None),
                sequence_number=count,
            )

    responses_stream_generator.streams_refusals = True  # type: ignore[attr-defined]
    cls.responses_stream_generator = responses_stream_generator
