"""Servers whose processes are killed."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from load import tree
from serving import Server

SHARED = "/dev/shm/"
SLICE, PAUSE = 0.02, 0.2  # seconds
GIVES_WAY = 15  # of nice


def find(pid: int, title: str) -> psutil.Process:
    """The process that a server started and vLLM named so."""
    found = [process for process in tree(pid) if title in " ".join(process.cmdline())]
    assert found, f"none of {[process.cmdline() for process in tree(pid)]} is {title}"
    return found[0]


class Watched:
    """The processes of a server, and what they share, as they are now."""

    def __init__(self, pid: int) -> None:
        self.processes = tree(pid)
        self.files = shared(self.processes)

    def gone(self, seconds: float) -> None:
        """Wait until all of them have ended and left nothing in shared memory."""
        until(lambda: not any(map(_runs, self.processes)), seconds)
        until(lambda: not any(path.exists() for path in self.files), seconds)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared(processes: list[psutil.Process]) -> set[Path]:
    """The files in shared memory that they have mapped and that have names."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    found = {
        line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if SHARED in line
    }
    return {Path(name) for name in found if not name.endswith(" (deleted)")}


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {seconds} s"
        time.sleep(0.02)


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Hold a process still, and where it goes on meanwhile, let it give way to this one.

    Linux was seen to let an engine run for a second before a test that waited for the same core.
    At the end the process goes on as before, if it has not ended.
    """
    _set_nice(process, GIVES_WAY)
    process.suspend()
    try:
        yield
    finally:
        _set_nice(process, 0)
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _set_nice(process: psutil.Process, nice: int) -> None:
    """Of a process, and where Linux weighs sessions against each other, of its session."""
    with suppress(psutil.Error, OSError):  # to lower it again needs a privilege
        process.nice(nice)
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))


def in_slices(process: psutil.Process, condition: Callable[[], bool], seconds: float) -> None:
    """Let a suspended process go on a little at a time until the condition holds.

    A fast engine may be done with a whole answer before a client of a busy machine looks.
    """

    def holds() -> bool:
        process.resume()
        time.sleep(SLICE)
        process.suspend()
        time.sleep(PAUSE)  # what it said arrives
        return condition()

    until(holds, seconds)


def metrics(server: Server) -> str:
    return server.client.get("/metrics").raise_for_status().text


def value(metrics: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, in what /metrics says."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if re.match(rf"{re.escape(name)}[ {{]", line)
        and all(f'{key}="{wanted}"' in line for key, wanted in labels.items())
    ]
    assert found, f"no {name} with {labels}"
    return sum(found)
