"""Servers whose processes are killed."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from load import tree
from serving import Server

SHARED = "/dev/shm/"


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


def until(condition: Callable[[], Any], seconds: float, pause: float = 0.05) -> Any:
    """What is true within so many seconds; it is looked at again after each pause."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen in {seconds} s"
        time.sleep(pause)
    return found


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
