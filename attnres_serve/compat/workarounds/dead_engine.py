"""Errors for clients of a dead engine; vLLM's sentence refers to a stack trace above.

They get status 503: their requests were valid, and another server can answer them.
"""

from dataclasses import replace
from typing import Any

from attnres_serve import sentences
from attnres_serve.compat.patch import Patch
from attnres_serve.start import record
from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import refers

UNKNOWN = "the engine has ended"
ADVICE = "; ask another server, or ask again later."
STATUS, TYPE = 503, "ServiceUnavailableError"
_client: Any = None  # vLLM's client of this process's engine


def watch(client) -> None:
    """Watch a client's engine, so that ``sentence`` names the reason of its end."""
    global _client
    _client = client


def cause() -> str | None:
    """The reason of the engine's end, as the beginning of a sentence; None if it runs or unknown.

    A signal has precedence: a reported failure may be older.
    """
    resources = getattr(getattr(_client, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    engines = getattr(manager, "processes", ())
    first = getattr(manager, "failed_proc_name", None)  # the others are stopped afterwards
    for engine in sorted(engines, key=lambda one: one.name != first):
        status = engine.exitcode
        if status is not None and status < 0:
            return f"the engine {how_it_ended(status)}"
        if failure := _failure(engine.pid):
            return f"the engine failed: {failure}"
        if status is not None:
            return f"the engine {how_it_ended(status)}"
    return None


def _failure(engine: int) -> str | None:
    """The reported failure of an engine, or of the worker to which it refers."""
    reasons = record.read()
    reason = reasons.pop(engine, None)
    if reason is not None and refers(reason):
        return next((other for other in reversed(reasons.values()) if not refers(other)), reason)
    return reason


def sentence() -> str:
    """The sentence for clients."""
    reason = cause() or UNKNOWN
    return sentences.between(reason[:1].upper(), reason[1:], ADVICE)


def end_calls(client) -> None:
    """Fail waiting calls of a dead engine's methods; vLLM fails only requests.

    Call this in the client's event loop.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    calls = getattr(getattr(client, "engine_core", None), "utility_results", {})
    for call in calls.values():
        if not call.done():
            call.set_exception(EngineDeadError())


def _unavailable(original: Any) -> Any:
    """Give the error of a dead engine the status of an unavailable server."""

    def __init__(self, **options: Any) -> None:
        original(self, **options)
        if self.error.message.endswith(ADVICE):
            self.error.code, self.error.type = STATUS, TYPE

    return __init__


PATCH = Patch(  # for every failed answer, and the log
    targets=("vllm.v1.engine.exceptions:EngineDeadError.__str__",),
    make=lambda original: lambda self: sentence(),
    why="answers named a stack trace above",
    models="every model of our server",
    first=(0, 28),
)
LATER = Patch(
    targets=("vllm.entrypoints.serve.engine.protocol:ErrorResponse.__init__",),
    make=_unavailable,
    why="a dead engine was a 500, which clients do not repeat",
    models="every model of our server",
    first=(0, 29),
)
EARLIER = replace(
    LATER,
    targets=("vllm.entrypoints.openai.engine.protocol:ErrorResponse.__init__",),
    first=(0, 28),
    last=(0, 28),
)
END = Patch(  # ``server.lifecycle`` ends the server
    targets=("vllm.entrypoints.serve.exception_handling.handlers.vllm_error:terminate_if_errored",),
    make=lambda original: lambda server, engine: None,
    why="the first request that failed ended the server, and others found nobody",
    models="every model of our server",
    first=(0, 28),
)
PATCHES = PATCH, LATER, EARLIER, END
