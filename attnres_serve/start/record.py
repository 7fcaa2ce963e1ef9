"""Reasons of failed processes, shared among a server's processes: a server reads its engine's.

The record is a file in memory, because a full disk may be the reason.  It ends with the process
that made it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "ATTNRES_SERVE_RECORD"  # the path of the file, if one was made
NAME = "attnres-failures"
MOST = 1 << 16  # bytes; then the file is emptied
_held: dict[str, int] = {}  # descriptors of records by their paths


def make() -> tuple[int, str]:
    """A new record: its descriptor, and its path for this process and its children."""
    file = os.memfd_create(NAME)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def hold() -> None:
    """Keep the record open, so that a process without free descriptors can write."""
    path = os.environ.get(VARIABLE, "")
    if path not in _held:
        with suppress(OSError):
            _held[path] = _opened(path)


def write(reason: str) -> None:
    """Append the reason why this process failed; does nothing without a record."""
    line = json.dumps({"pid": os.getpid(), "reason": reason}).encode() + b"\n"
    with suppress(OSError), _record() as file:
        if os.fstat(file).st_size > MOST:
            os.ftruncate(file, 0)
        os.write(file, line)


def read() -> dict[int, str]:
    """The last reason of each process, by its id, in order of writing."""
    reasons: dict[int, str] = {}
    with suppress(OSError), _record() as file:
        for line in os.pread(file, 2 * MOST, 0).splitlines():
            entry = json.loads(line)
            reasons.pop(entry["pid"], None)
            reasons[entry["pid"]] = entry["reason"]
    return reasons


@contextmanager
def _record() -> Iterator[int]:
    path = os.environ.get(VARIABLE, "")
    file = _held[path] if path in _held else _opened(path)
    try:
        yield file
    finally:
        if path not in _held:
            os.close(file)


def _opened(path: str) -> int:
    if NAME not in os.readlink(path):  # its maker is gone, and another process has the number
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
