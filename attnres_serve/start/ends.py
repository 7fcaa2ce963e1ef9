"""How a process ended, in words; of a kill also whether memory may have been short."""

import signal
from contextlib import suppress

from attnres_serve.start import memory

_KILLS_BEFORE = memory.oom_kills()  # when this process began


def how_it_ended(status: int) -> str:
    """What an exit status says, as the end of a sentence: a signal, or the status itself.

    Args:
        status: as ``subprocess`` or a shell gives it.
    """
    number = status - 128 if status > 128 else -status
    if number <= 0:
        return f"ended with status {status}"
    words = f"was ended by signal {number}"
    with suppress(ValueError):  # one without a name
        words += f" ({signal.Signals(number).name})"
    return words + _out_of_memory() if number == signal.SIGKILL else words


def _out_of_memory() -> str:
    said = ", often the kernel's OOM killer"
    kills = memory.oom_kills()
    if kills is None or _KILLS_BEFORE is None:
        return said
    return f"{said} (OOM kills in its control group since the start: {kills - _KILLS_BEFORE})"
