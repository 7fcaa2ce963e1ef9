"""docs/build/upstream/errors-in-responses.md"""

import asyncio
from types import SimpleNamespace
from typing import Any


def fault() -> bool:
    """A refusal within a stream leaves the stream as an exception."""
    from vllm.exceptions import VLLMValidationError

    found: list[str] = []
    try:
        asyncio.run(read(found))
    except VLLMValidationError:
        return True
    finally:
        assert found[:1] == ["response.created"], "the stream had not begun"
    return "error" not in found


async def read(found: list[str]) -> None:
    """Append the types of the events of a stream that is refused when it is first awaited."""
    from vllm import SamplingParams
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.exceptions import VLLMValidationError

    async def refused():
        raise VLLMValidationError("No.", parameter="text")
        yield

    serving: Any = OpenAIServingResponses.__new__(OpenAIServingResponses)
    serving.use_harmony = False
    context: Any = SimpleNamespace(response_parser=None)
    request: Any = ResponsesRequest(input="a", stream=True)
    nothing: Any = None
    async for event in serving.responses_stream_generator(
        request, SamplingParams(max_tokens=4), refused(), context, "mine", nothing, nothing
    ):
        found.append(event.type)
