"""Events that report the progress of an engine's processes to the process that started them.

The listener makes a named pipe and puts its path into the environment (``engine_log``): processes
that vLLM spawns would not inherit a descriptor.
"""

import json
import logging
import os
from contextlib import suppress
from typing import Any

# Events at the end of a phase of a server's start, and the name of the phase.
PHASES = {
    "imported": "import vLLM",
    "built": "start the engine",
    "loaded": "load the weights",
    "warm": "compile, warm up",
    "ready": "first request",
}
BEGUN = dict(zip(PHASES, [*PHASES.values()][1:], strict=False))  # the phase after each event
VARIABLE = "ATTNRES_SERVE_EVENTS"  # the path of the pipe, set by a listener
_held: dict[str, int] = {}  # descriptors of pipes by their paths


def is_heard() -> bool:
    """Whether there is a listener; under vLLM's command there is none."""
    return bool(os.environ.get(VARIABLE))


def tell(event: str, **facts: Any) -> None:
    """Send an event; does nothing without a listener, and never waits.

    Args:
        event: an event that ``server.start.console`` or ``engine_log`` knows.
        facts: JSON values.
    """
    if is_heard():
        path = os.environ[VARIABLE]
        line = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
        with suppress(OSError):  # the listener is gone
            pipe = _held[path] if path in _held else _opened(path)
            try:
                os.write(pipe, line.encode())
            finally:
                if path not in _held:
                    os.close(pipe)


def hold() -> None:
    """Keep the pipe open, so that a process without free descriptors can report that."""
    if is_heard() and (path := os.environ[VARIABLE]) not in _held:
        with suppress(OSError):
            _held[path] = _opened(path)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


class _Warnings(logging.Handler):
    """Sends logged messages as events ``warning``."""

    def emit(self, record: logging.LogRecord) -> None:
        tell("warning", text=record.getMessage())


WARNINGS = _Warnings(logging.WARNING)
