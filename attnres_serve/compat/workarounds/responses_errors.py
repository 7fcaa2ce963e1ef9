"""Errors within a stream of ``/v1/responses``, on which vLLM 0.32 closes the connection.

Its other routes stream an event with the error.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _streaming_refusals(original: Any) -> Any:
    """End such a stream with OpenAI's event of the type ``error``."""

    async def responses_stream_generator(self, *rest, **options):
        from openai.types.responses import ResponseErrorEvent
        from vllm.entrypoints.openai.models.serving import create_error_response
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        count = 0
        try:
            async for event in original(self, *rest, **options):
                yield event
                count += 1
        except (VLLMClientError, EngineDeadError) as error:
            answer = create_error_response(error).error
            yield ResponseErrorEvent(
                type="error",
                code=str(answer.code),
                message=answer.message,
                param=answer.param,
                sequence_number=count,
            )

    return responses_stream_generator


PATCH = Patch(
    targets=(
        "vllm.entrypoints.openai.responses.serving"
        ":OpenAIServingResponses.responses_stream_generator",
    ),
    make=_streaming_refusals,
    why="a refusal, or a dead engine, cut the connection",
    models="every model of our server",
    first=(0, 28),
    report="errors-in-responses",
)
