"""``X-Request-Id``, in and out.

vLLM names a request by this header where it is given.  Here a request without one gets one, and
every response returns it, so that response, answer (``cmpl-ID``) and log have one name.
"""

import re
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
USABLE = re.compile(r"[!-~]{1,128}")  # it goes into logs


class RequestIds:
    """ASGI middleware; an id that is empty, long or not printable is replaced."""

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
