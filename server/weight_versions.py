"""``weight_versions`` in responses: the weights that computed them, if weights may be replaced."""

import json
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnres_serve.compat import token_counts

KEY = "weight_versions"
OURS = "/v1/attn_res"  # a trace states its version itself, and is large
# The last event of a streamed response: of completions and chats, responses, and messages.
ENDS = (b'"finish_reason":"', b'"type":"response.completed"', b'"type":"message_delta"')


class WeightVersions:
    """ASGI middleware: adds to a response the versions of the weights that computed it, in order.

    A response that was paused while weights were replaced has two.  In a stream, the last event has
    them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or get_route_path(scope).startswith(OURS):
            await self.app(scope, receive, send)
            return
        counts = token_counts.current()
        start: Message | None = None  # held back, because its content length changes
        is_stream = False

        async def send_versions(message: Message) -> None:
            nonlocal start, is_stream
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = kind.startswith("text/event-stream")
                if kind.startswith("application/json"):
                    start = message
                    return
            elif is_stream and any(end in message.get("body", b"") for end in ENDS):
                message = {**message, "body": _in_events(message["body"], counts.versions)}
            elif start is not None:
                if counts.versions and not message.get("more_body", False):
                    body = _named(message["body"], counts.versions)
                    MutableHeaders(scope=start)["content-length"] = str(len(body))
                    message = {**message, "body": body}
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, send_versions)


def _named(body: bytes, versions: list[str]) -> bytes:
    """A JSON object with the versions added."""
    content: dict[str, Any] = json.loads(body) | {KEY: versions}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _in_events(body: bytes, versions: list[str]) -> bytes:
    """Events of a stream, with the versions added to last events."""
    lines = body.split(b"\n")
    for place, line in enumerate(lines):
        if versions and any(end in line for end in ENDS):
            name, _, data = line.partition(b": ")
            lines[place] = name + b": " + _named(data, versions)
    return b"\n".join(lines)
