"""docs/build/upstream/errors-in-messages.md"""

import asyncio
import json
from typing import Any


def fault() -> bool:
    """The error of a chat's stream becomes another one."""
    return asyncio.run(_told("No.")) != "No."


async def _told(message: str) -> str:
    """What an event says of the error that a stream ends by."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    async def refused():
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        yield f"data: {json.dumps({'error': error})}\n\n"
        yield "data: [DONE]\n\n"

    serving: Any = AnthropicServingMessages.__new__(AnthropicServingMessages)
    events = [event async for event in serving.message_stream_converter(refused())]
    (error,) = [event for event in events if event.startswith("event: error")]
    said: str = json.loads(error.partition("data: ")[2])["error"]["message"]
    return said
