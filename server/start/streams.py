"""Streams of the supervisor that never block: a stalled reader does not delay signals."""

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TextIO

WAITING = 1000  # queued pieces, of a pipe's size at most; further ones are lost
PATIENCE = 1.0  # seconds for the last pieces


def mend() -> None:
    """Open missing standard streams, and let them escape characters that their encoding lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


class Writer:
    """A stream that a thread writes, in order.

    Args:
        stream: a stream with a file descriptor, to which nothing else writes.
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
        """Wait until everything is written, at most ``PATIENCE``."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=PATIENCE)
        self._thread.join(PATIENCE)

    def _write(self) -> None:
        while (data := self._waiting.get()) is not None:
            with suppress(OSError):  # a closed reader must not end a server
                while data:
                    data = data[os.write(self._stream.fileno(), data) :]


def _are_one() -> bool:
    """Whether stdout and stderr are one file, so that their order has to be kept."""
    return os.path.samestat(*(os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr)))


def writers() -> tuple[Writer, Writer]:
    """Writers of stdout and stderr; a single one if both are one file."""
    out = Writer(sys.stdout)
    return out, out if _are_one() else Writer(sys.stderr)


def pipes() -> dict[str, tuple[int, int]]:
    """Both ends of pipes that replace stdout and stderr; a single pipe if both are one file."""
    err = os.pipe()
    out = err if _are_one() else os.pipe()
    for read in {out[0], err[0]}:
        os.set_blocking(read, False)
    return {"out": out, "err": err}
