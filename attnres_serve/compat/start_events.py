"""Events by which the processes of an engine tell whoever began them how far they are.

Whoever listens makes a named pipe and puts its path into the environment (``engine_log``): a
descriptor would not be handed on to the processes that vLLM spawns.
"""

import json
import logging
import os
from contextlib import suppress
from typing import Any

VARIABLE = "ATTNRES_SERVE_EVENTS"  # the path of the pipe, set where somebody listens


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
        line = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
        with suppress(OSError):  # whoever listened is gone
            pipe = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, line.encode())
            finally:
                os.close(pipe)


class _Warnings(logging.Handler):
    """Tells what is logged as an event ``warning``."""

    def emit(self, record: logging.LogRecord) -> None:
        tell("warning", text=record.getMessage())


WARNINGS = _Warnings(logging.WARNING)
