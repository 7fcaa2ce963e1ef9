"""Requests for the model, and changes of the model that none of them may straddle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from attnres_serve.server.routes import weights


class Turns:
    """Counts the requests that run; a change waits for their end, and new ones wait for its own.

    One request may ask the engine many times, so that its pause would come between two of them.
    """

    def __init__(self) -> None:
        self._running = 0
        self._idle, self._open, self._changing = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._idle.set()
        self._open.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """A request runs within."""
        while not self._open.is_set():  # the next change may be quicker than this one
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def change(self, seconds: float) -> AsyncIterator[None]:
        """No request runs within.

        Raises:
            TimeoutError: some still run after so many seconds.
        """
        async with self._changing:
            self._open.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
                yield
            finally:
                self._open.set()


class InTurn:
    """ASGI middleware: gives requests for the model their turn, when their bodies are there."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self.app = app
        self.turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http" and scope["method"] == "POST"
        if not is_http or get_route_path(scope) in weights.ROUTES:
            await self.app(scope, receive, send)
            return
        async with self.turns.request():
            await self.app(scope, receive, send)
