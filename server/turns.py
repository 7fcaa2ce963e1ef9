"""Requests for the model, and changes of the model, which no request may overlap.

One request may call the engine many times, so a pause of the engine could come between its calls.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from attnres_serve.server.routes import weights


class Turns:
    """A change waits for running requests to end, and new requests for the change to end."""

    def __init__(self) -> None:
        self._running = 0
        self._idle, self._open, self._changing = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._idle.set()
        self._open.set()

    @asynccontextmanager
    async def change(self, seconds: float) -> AsyncIterator[None]:
        """A block in which no request runs.

        Raises:
            TimeoutError: some, or another change, still run after so many seconds.
        """
        async with asyncio.timeout(seconds) as limit, self._changing:
            self._open.clear()
            try:
                await self._idle.wait()
                limit.reschedule(None)
                yield
            finally:
                self._open.set()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: requests for the model get their turn, when their bodies are there."""

        async def in_turn(scope: Scope, receive: Receive, send: Send) -> None:
            is_post = scope["type"] == "http" and scope["method"] == "POST"
            if not is_post or get_route_path(scope) in weights.ROUTES:
                await app(scope, receive, send)
                return
            while not self._open.is_set():  # the next change may be quicker than this request
                await self._open.wait()
            self._running += 1
            self._idle.clear()
            try:
                await app(scope, receive, send)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

        return in_turn
