"""Descriptions of the end of a process; for a kill also whether memory may have been short."""

import signal
from contextlib import suppress

from attnres_serve.start import memory

_KILLS_BEFORE = memory.oom_kills()  # at the start of this process


def how_it_ended(status: int) -> str:
    """The meaning of an exit status, as the end of a sentence: a signal, or the status.

    Args:
        status: in the convention of ``subprocess`` or a shell.
    """
    number = status - 128 if status > 128 else -status
    if number <= 0:
        return f"ended with status {status}"
    sentence = f"was ended by signal {number}"
    with suppress(ValueError):  # a signal without a name
        sentence += f" ({signal.Signals(number).name})"
    return sentence + _out_of_memory() if number == signal.SIGKILL else sentence


def _out_of_memory() -> str:
    guess = ", often the kernel's OOM killer"
    kills = memory.oom_kills()
    if kills is None or _KILLS_BEFORE is None:
        return guess
    return f"{guess} (OOM kills in its control group since the start: {kills - _KILLS_BEFORE})"
