"""Events by which the processes of an engine tell whoever began them how far they are.

Whoever listens makes a named pipe and puts its path into the environment (``engine_log``): a
descriptor would not be handed on to the processes that vLLM spawns.
"""

import json
import logging
import os
from contextlib import suppress
from typing import Any

# Events that end a phase of a server's start, and the name of the phase.
PHASES = {
    "imported": "import vLLM",
    "built": "start the engine",
    "loaded": "load the weights",
    "warm": "compile, warm up",
    "ready": "first request",
}
BEGUN = dict(zip(PHASES, [*PHASES.values()][1:], strict=False))  # the phase after each event
VARIABLE = "ATTNRES_SERVE_EVENTS"  # the path of the pipe, set where somebody listens
_held: dict[str, int] = {}  # descriptors of pipes by their paths


def is_heard() -> bool:
    """Whether somebody listens; vLLM's own command has nobody."""
    return bool(os.environ.get(VARIABLE))


def tell(event: str, **facts: Any) -> None:
    """Tell an event; does nothing where nobody listens, and never waits.

    Args:
        event: a word that ``server.start.console`` or ``engine_log`` knows.
        facts: values that JSON can hold.
    """
    if is_heard():
        path = os.environ[VARIABLE]
        line = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
        with suppress(OSError):  # whoever listened is gone
            pipe = _held[path] if path in _held else _opened(path)
            try:
                os.write(pipe, line.encode())
            finally:
                if path not in _held:
                    os.close(pipe)


def hold() -> None:
    """Keep the pipe open, so that a process can tell that it has no free descriptor."""
    if is_heard() and (path := os.environ[VARIABLE]) not in _held:
        with suppress(OSError):
            _held[path] = _opened(path)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


class _Warnings(logging.Handler):
    """Tells what is logged as an event ``warning``."""

    def emit(self, record: logging.LogRecord) -> None:
        tell("warning", text=record.getMessage())


WARNINGS = _Warnings(logging.WARNING)
