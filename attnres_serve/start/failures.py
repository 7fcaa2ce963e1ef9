"""Reports of exceptions that end processes of an engine."""

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
    """The reason why this process ends, as a part of a sentence: an exception or a killed child.

    A killed process reports nothing itself, and its parent only notices that it is gone.
    """
    if is_ours(error):
        return str(error).rstrip(".")  # a sentence of ours
    formatted = traceback.TracebackException.from_exception(error)
    formatted.__notes__ = None  # vLLM puts the traceback there
    sentence = engine_log.shortened("".join(formatted.format_exception_only()))
    processes = sys.modules.get("multiprocessing.process")  # if not imported, there is no child
    for child in getattr(processes, "_dangling", ()):
        is_child = child._parent_pid == os.getpid() and not child._closed
        number = -(child.exitcode or 0) if is_child else 0
        if number > 0 and number != signal.SIGTERM:  # vLLM sends SIGTERM to the others
            killed = f"{child.name} {ends.how_it_ended(-number)}"
            return killed if engine_log.refers(sentence) else f"{killed}, and then {sentence}"
    return sentence


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a sentence of ours for users, to which a traceback adds nothing."""
    return isinstance(error, (CheckpointError, SettingError))


def tell(error: BaseException) -> None:
    """Send the reason why this process ends to the listener, and record it."""
    reason = reason_of(error)
    record.write(reason)
    events.tell("failed", reason=reason, ours=is_ours(error))


@contextmanager
def reported() -> Iterator[None]:
    """Report the exception that leaves the context."""
    try:
        yield
    except Exception as error:
        tell(error)
        raise


class _Teller(logging.Handler):
    """Reports exceptions that are logged as errors; a worker logs the one that ends it."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            tell(error)


_TELLER = _Teller(logging.ERROR)


def tell_logged() -> None:
    """Report every exception that vLLM logs as an error in this process (idempotent)."""
    events.hold()
    record.hold()
    logging.getLogger("vllm").addHandler(_TELLER)
