"""Free memory, by the machine and by the limits of control groups."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SYSTEM = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
NODES = Path("/sys/devices/system/node")


class _Version(NamedTuple):
    """A version of control groups.

    Attributes:
        folder: its folder.
        limit, used: the files with these sizes.
        reclaimed: the key of reclaimable memory (cached files).
        events: the file with the count of OOM kills.
    """

    folder: str
    limit: str
    used: str
    reclaimed: str
    events: str


_VERSIONS = {
    "": _Version("", "memory.max", "memory.current", "inactive_file", "memory.events"),
    "memory": _Version(
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.oom_control",
    ),
}


def left() -> int:
    """Free bytes by the machine and every limit of a container or a service."""
    import psutil  # vLLM requires it, and without vLLM nothing calls this

    return max(min([psutil.virtual_memory().available, *_left_in_groups()]), 0)


def left_on_a_node() -> int:
    """Free bytes on the fullest memory node with processors.

    A worker on CPU allocates from one node.  Without nodes this is ``left``.
    """
    free = []
    for node in NODES.glob("node[0-9]*"):
        with suppress(OSError, ValueError, KeyError):
            lines = (line.split() for line in (node / "meminfo").read_text().splitlines())
            sizes = {fields[2].rstrip(":"): int(fields[3]) * 1024 for fields in lines}
            if (node / "cpulist").read_text().strip():
                files = sizes["Active(file)"] + sizes["Inactive(file)"]
                free.append(sizes["MemFree"] + files + sizes["SReclaimable"])
    return min([*free, left()])


def oom_kills() -> int | None:
    """The number of processes of this control group that the kernel's OOM killer killed.

    They count here no matter which limit was reached.  None if no group counts them.
    """
    for version, top, here in _groups():
        counts = (here if here.is_dir() else top) / version.events
        if counts.is_file():
            return _counted(counts, "oom_kill")
    return None


def _left_in_groups() -> Iterator[int]:
    """The bytes that each group of this process has left; nothing for groups without limit."""
    for version, top, here in _groups():
        for group in {top, here, *here.parents}:
            if group == top or top in group.parents:
                with suppress(OSError, ValueError):  # no limit: no such file, or "max"
                    sizes = (group / name for name in (version.limit, version.used))
                    most, taken = (int(size.read_text()) for size in sizes)
                    yield most - taken + _counted(group / "memory.stat", version.reclaimed)


def _groups() -> Iterator[tuple[_Version, Path, Path]]:
    """The folders of the top group and of this process's group, for each version.

    A container may see its group as the top, under any path.
    """
    try:
        groups = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        for name in {*controllers.split(",")} & {*_VERSIONS}:
            top = SYSTEM / _VERSIONS[name].folder
            yield _VERSIONS[name], top, Path(os.path.normpath(f"{top}/{path}"))


def _counted(statistics: Path, name: str) -> int:
    with suppress(OSError):
        for line in statistics.read_text().splitlines():
            if line.partition(" ")[0] == name:
                return int(line.split()[1])
    return 0
