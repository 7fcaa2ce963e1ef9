"""``X-Request-Id`` of requests and responses.

vLLM uses this header of a request as its id.  Here a request without the header gets one, and every
response returns it, so that headers, body (``cmpl-ID``) and log have one id.
"""

import re
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
USABLE = re.compile(r"[!-~]{1,128}")  # it is logged


class RequestIds:
    """ASGI middleware; an empty, long or unprintable id is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        name = headers.get(HEADER, "")
        if not USABLE.fullmatch(name):
            name = headers[HEADER] = uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self.app(scope, receive, send_named)
