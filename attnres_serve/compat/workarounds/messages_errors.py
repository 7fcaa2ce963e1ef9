"""Errors within a stream of ``/v1/messages``, which vLLM 0.32 reports as an invalid chunk.

It converts the stream of a chat to events, and reads an error in it as a chunk.
"""

import json
from typing import Any

from attnres_serve.compat.patch import Patch

ERROR = 'data: {"error":'


def _with_errors(original: Any) -> Any:
    """End such a stream with Anthropic's event of the type ``error``."""

    async def message_stream_converter(self, generator):
        error: dict[str, Any] = {}

        async def until_error():
            async for item in generator:
                if item.startswith(ERROR):
                    error.update(json.loads(item.removeprefix("data:"))["error"])
                    return
                yield item

        async for event in original(self, until_error()):
            yield event
        if error:
            content = {"type": error["type"], "message": error["message"]}
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': content})}\n\n"

    return message_stream_converter


PATCH = Patch(
    targets=(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter",
    ),
    make=_with_errors,
    why="an error in a stream was told as one of validation",
    models="every model of our server",
    first=(0, 28),
    report="errors-in-messages",
)
