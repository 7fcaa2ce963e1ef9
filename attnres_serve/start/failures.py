"""Exceptions that end processes of an engine, told by the process that they end."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.start import ends, engine_log, events, record


def reason_of(error: BaseException) -> str:
    """What ended this process, in a part of a sentence: an exception and a child that was killed.

    A process that was killed tells nothing, and its parent sees no more than that it is gone.
    """
    if is_ours(error):
        return str(error).rstrip(".")  # a sentence of ours
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None  # where vLLM puts the traceback
    said = engine_log.shortened("".join(told.format_exception_only()))
    processes = sys.modules.get("multiprocessing.process")  # without it there is no child
    for child in getattr(processes, "_dangling", ()):
        is_own = child._parent_pid == os.getpid() and not child._closed
        number = -(child.exitcode or 0) if is_own else 0
        if number > 0 and number != signal.SIGTERM:  # which vLLM sends the others
            killed = f"{child.name} {ends.how_it_ended(-number)}"
            return killed if engine_log.refers(said) else f"{killed}, and then {said}"
    return said


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a sentence for a user, to which a traceback adds nothing."""
    return isinstance(error, (CheckpointError, SettingError))


def tell(error: BaseException) -> None:
    """Tell whoever listens, and whoever asks later, what ended this process."""
    reason = reason_of(error)
    record.write(reason)
    events.tell("failed", reason=reason, ours=is_ours(error))


@contextmanager
def told() -> Iterator[None]:
    """Tell the exception that leaves the context."""
    try:
        yield
    except Exception as error:
        tell(error)
        raise


class _Teller(logging.Handler):
    """Tells exceptions that are logged as errors; a worker logs the one that ends it."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            tell(error)


_TELLER = _Teller(logging.ERROR)


def tell_logged() -> None:
    """Tell every exception that vLLM logs as an error in this process (idempotent)."""
    events.hold()
    record.hold()
    logging.getLogger("vllm").addHandler(_TELLER)
