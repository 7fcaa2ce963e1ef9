"""Readiness and shutdown: ``GET /ready``, the end after a signal, and the end of a crashed engine.

vLLM's server handles signals, answers ``GET /health`` and stops its engine.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnres_serve.compat import (
    engine_config,
    engines_beside,
    host,
    openai_app,
    openai_server,
    requests,
)
from attnres_serve.compat.workarounds import dead_engine
from attnres_serve.compat.workarounds.replacing_calls import why_not_whole
from attnres_serve.server.bounds.guard import METRICS, PROBES, is_of_page
from attnres_serve.server.refusal import refuse
from attnres_serve.server.routes import weights
from attnres_serve.server.start import example
from attnres_serve.start import events

ANSWERED = PROBES | {METRICS}  # until the end, like the page
GRACE = 5  # seconds for an idle engine to end, and then for connections to close
WARM_UP = 120  # seconds for the first request, after which the port is opened anyway
AGAIN = 1.0  # seconds after which a signal is a second one; launchers repeat the first at once
LOOK = 0.5  # seconds between two checks whether an engine is dead
FAREWELL = 1.0  # seconds in which requests of a dead engine get their errors, and probes 503

router = APIRouter(tags=["Attention Residuals"])


class Lifecycle:
    """The state of a server between its start and its end.

    Args:
        delay: seconds after a signal in which new requests are accepted, until load balancers have
            read from /ready that the server is stopping.

    Attributes:
        running: number of running requests, except those to public routes.
        stopping: whether a signal was received.
        refusing: whether new requests are refused.
    """

    def __init__(self, delay: float = 0) -> None:
        self.delay = delay
        self.running = 0
        self.stopping = False
        self.refusing = False
        self._cold: str | None = "The server is warming up."
        self._client: Any = None
        self._state: Any = None
        self._beside: list[Any] = []  # engines that are not children of this process

    async def begin(self, client, state) -> None:
        """Warm up; called when the engine runs and before the port is open.

        The first request costs more than any later one, so it is sent here.  If it takes too long,
        the port is opened, and the server becomes ready when the request ends.

        Args:
            client: vLLM's engine client.
            state: the state of vLLM's app.
        """
        events.tell("warm")
        self._client, self._state = client, state
        self._loop = asyncio.get_running_loop()
        if not engine_config.is_only_api_server(client.vllm_config):
            self._beside = engines_beside.running()
        openai_app.on_shutdown(client, self.drain)
        self._warming = asyncio.create_task(self._warm_up())
        await asyncio.wait([self._warming], timeout=WARM_UP)
        self._watch = asyncio.create_task(self._end_when_dead())
        if events.is_heard():
            self._ready = asyncio.create_task(self._tell_when_open())

    async def _warm_up(self) -> None:
        try:
            await requests.generate(self._client, [0], 2, "attn-res-warm-up", ignore_eos=True)
        except Exception as error:
            if not requests.is_refusal(error):
                self._cold = "The request that warms up failed; the server's log says why."
                host.logger().exception("AttnRes: the request that warms up failed.")
                return
            # A model of another kind, or a context of one token.
            host.logger().warning("AttnRes: the request that warms up was refused: %s", error)
        self._cold = None

    def unready(self) -> str | None:
        """Why requests should not be sent here, in one sentence; None if the server is ready."""
        if self.stopping:
            return "The server is stopping."
        return "The engine crashed." if self.is_dead() else self._cold or self.not_whole()

    def is_dead(self) -> bool:
        """Whether the engine has ended without being stopped."""
        return self._client is not None and self._client.errored

    def not_whole(self) -> str | None:
        """Why the engine serves nothing after a failed update, in one sentence, or None."""
        return why_not_whole(self._client)

    def drain(self, timeout: float) -> float:
        """Wait for the delay, then refuse new requests and wait for the running ones.

        Called in one of vLLM's threads.  vLLM itself waits only in the engine, which drops requests
        that have not reached it yet, and does not know requests that need more than tokens, such as
        traces.

        Returns:
            Seconds in which the engine has to end.
        """
        if not self.stopping:
            end = time.monotonic() + self.delay
            # A launcher whose engine has crashed stops its servers too.
            self._loop.call_soon_threadsafe(self._look_beside)
            self.stopping = True
            if engine_config.is_only_api_server(self._client.vllm_config):
                arm = self._abort_on_a_signal
                self._loop.call_soon_threadsafe(self._loop.call_later, AGAIN, arm)
            self._wait_while(lambda: True, end)
            self.refusing = True
        self._wait_while(lambda: self.running > 0, time.monotonic() + timeout)
        self._tell_end()
        return 0 if self.running else GRACE

    def _wait_while(self, condition: Callable[[], bool], end: float) -> None:
        while condition() and time.monotonic() < end and not self._client.errored:
            time.sleep(0.05)

    def _abort_on_a_signal(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._abort, number)

    def _abort(self, number: int) -> None:
        host.logger().warning("AttnRes: a second signal, so running requests are cut off.")
        os._exit(
            128 + number
        )  # engine and workers end with this process (``orphans.end_with_parent``)

    async def _tell_when_open(self) -> None:
        while not getattr(getattr(self._state, "server", None), "started", False):
            await asyncio.sleep(0.05)
        url, socket = openai_app.url_of(self._state), openai_app.socket_of(self._state)
        ask = example.request(
            url,
            socket,
            openai_app.served_names(self._state)[0],
            bool(openai_server.api_keys(self._state.args)),
            engine_config.has_tokenizer(self._client.vllm_config),
        )
        events.tell("ready", url=url, socket=socket, ask=ask, problem=self.unready())

    def _look_beside(self) -> None:
        if any(map(engines_beside.has_ended, self._beside)):
            engines_beside.declare_dead(self._client)

    async def _end_when_dead(self) -> None:
        """Stop the server of a dead engine, sooner than vLLM's watchdog does.

        ``openai_app.on_shutdown`` sets the exit status.
        """
        while (server := getattr(self._state, "server", None)) is None:
            await asyncio.sleep(LOOK)
        server.config.timeout_graceful_shutdown = GRACE  # a client may never read its response
        while not self._client.errored:
            await asyncio.sleep(LOOK)
            if not self.stopping:
                self._look_beside()
        dead_engine.end_calls(self._client)
        if self.stopping or openai_app.outlives_engine():
            return
        why = dead_engine.cause() or dead_engine.UNKNOWN
        host.logger().error("AttnRes: %s, so the server ends, with status 1.", why)
        await asyncio.sleep(FAREWELL)
        self._tell_end()
        server.should_exit = True

    def _tell_end(self) -> None:
        """Send the reason of the engine's end, if it has ended, to the supervisor."""
        if self._client.errored and (cause := dead_engine.cause()):
            events.tell("dead", reason=cause)


def is_answered(path: str) -> bool:
    """Whether a request is answered during a drain, which does not wait for it.

    Requests to public routes must not delay the end: a client may read slowly.
    """
    return path in ANSWERED or is_of_page(path)


class Gate:
    """ASGI middleware: counts running requests, and refuses new ones when the server stops."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self.app = app
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_answered(get_route_path(scope)):
            await self.app(scope, receive, send)
        elif self.lifecycle.refusing:
            message = "The server is stopping; retry on another replica, or retry later."
            await refuse(503, message, retry_after=str(GRACE), connection="close")(
                scope, receive, send
            )
        elif self._is_work(scope) and (reason := self.lifecycle.not_whole()) is not None:
            await refuse(503, reason)(scope, receive, send)
        else:
            self.lifecycle.running += 1
            try:
                await self.app(scope, receive, self._last_of_connection(send))
            finally:
                self.lifecycle.running -= 1

    def _is_work(self, scope: Scope) -> bool:
        """Whether a request uses the model, instead of replacing its weights."""
        path = get_route_path(scope)
        return scope["method"] == "POST" and (path == "/resume" or path not in weights.ROUTES)

    def _last_of_connection(self, send: Send) -> Send:
        """A ``send`` that closes connections when the server ends, so that clients reconnect."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers, is_dead = MutableHeaders(scope=message), self.lifecycle.is_dead()
                if self.lifecycle.stopping or is_dead:
                    headers["connection"] = "close"
                if is_dead and message["status"] == dead_engine.STATUS:
                    headers["retry-after"] = str(GRACE)
            await send(message)

        return send_last


class Readiness(BaseModel):
    """Whether a request should be sent here."""

    ready: bool
    reason: str | None = Field(description="why not, in one sentence")


@router.get(
    "/ready",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "no request should be sent here"}},
)
async def ready(request: Request) -> JSONResponse:
    """Whether a request is answered now, and without anything left to warm up."""
    reason = request.app.state.attn_res_lifecycle.unready()
    return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)
