"""Errors within a stream of ``/v1/responses``, at which vLLM 0.32 cuts the connection.

Its other routes stream an event that says what is wrong.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _streaming_refusals(own: Any) -> Any:
    """Have such a stream end by OpenAI's event of the type ``error``."""

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

    return responses_stream_generator


PATCH = Patch(
    targets=(
        "vllm.entrypoints.openai.responses.serving"
        ":OpenAIServingResponses.responses_stream_generator",
    ),
    make=_streaming_refusals,
    why="a refusal cut the connection",
    models="every model of our server",
    first=(0, 28),
    report="errors-in-responses",
)
