"""Streams of the supervisor that wait for no reader: one that stalls holds up no signal."""

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TextIO

WAITING = 1000  # pieces that wait for a reader, of a pipe's size at most; more are lost
PATIENCE = 1.0  # seconds for the last ones


def mend() -> None:
    """Give a process what it was begun without, and let it write what its encoding lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


class Writer:
    """A stream that a thread writes, in order.

    Args:
        stream: has a file; nothing else writes to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, data: str | bytes) -> None:
        if isinstance(data, str):
            data = data.encode(self._stream.encoding, self._stream.errors or "")
        with suppress(queue.Full):
            self._waiting.put_nowait(data)

    def close(self) -> None:
        """Wait for what was written, but no longer than a reader may take."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=PATIENCE)
        self._thread.join(PATIENCE)

    def _write(self) -> None:
        while (data := self._waiting.get()) is not None:
            with suppress(OSError):  # nobody reads it any more, which must not end a server
                while data:
                    data = data[os.write(self._stream.fileno(), data) :]


def _are_one() -> bool:
    """Whether stdout and stderr are one file, whose order is to be kept."""
    return os.path.samestat(*(os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr)))


def writers() -> tuple[Writer, Writer]:
    """Writers of stdout and stderr: a single one if both are one file."""
    out = Writer(sys.stdout)
    return out, out if _are_one() else Writer(sys.stderr)


def pipes() -> dict[str, tuple[int, int]]:
    """Both ends of a pipe in the place of stdout, and of stderr: a single one as well."""
    err = os.pipe()
    out = err if _are_one() else os.pipe()
    for read in {out[0], err[0]}:
        os.set_blocking(read, False)
    return {"out": out, "err": err}
