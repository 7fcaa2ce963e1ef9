"""Why processes of a server failed, for any of them to read: a server asks it of its dead engine.

It is a file in memory, as a full disk has no room for the reason that it is full.  It ends with the
process that made it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "ATTNRES_SERVE_RECORD"  # the path of the file, set where somebody made one
NAME = "attnres-failures"
MOST = 1 << 16  # bytes; what is older goes
_held: dict[str, int] = {}  # descriptors of records by their paths


def make() -> tuple[int, str]:
    """A new record: its descriptor, and its path for this process and its children."""
    file = os.memfd_create(NAME)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def hold() -> None:
    """Keep the record open, so that a process can write that it has no free descriptor."""
    path = os.environ.get(VARIABLE, "")
    if path not in _held:
        with suppress(OSError):
            _held[path] = _opened(path)


def write(reason: str) -> None:
    """Keep why this process failed, after what it wrote before; nothing without a record."""
    line = json.dumps({"pid": os.getpid(), "reason": reason}).encode() + b"\n"
    with suppress(OSError), _record() as file:
        if os.fstat(file).st_size > MOST:
            os.ftruncate(file, 0)
        os.write(file, line)


def read() -> dict[int, str]:
    """The last reason of each process, by its id, in the order in which they were written."""
    found: dict[int, str] = {}
    with suppress(OSError), _record() as file:
        for line in os.pread(file, 2 * MOST, 0).splitlines():
            told = json.loads(line)
            found.pop(told["pid"], None)
            found[told["pid"]] = told["reason"]
    return found


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
    if NAME not in os.readlink(path):  # whoever made it is gone, and another has its number
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
