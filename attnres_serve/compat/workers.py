"""The workers of a command line on this machine, and their cores on a CPU.

vLLM gives a worker the cores of one memory node.  With more workers than nodes it raises, but only
after its start, and parallel engines get the same cores.  So the cores are divided here, before
vLLM is imported.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnres_serve.compat import device
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
AUTO, UNBOUND = "auto", "nobind"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # cores that an engine leaves to other processes
NODES = "CPU_VISIBLE_MEMORY_NODES"
SIMULATED = "VLLM_CPU_SIM_MULTI_NUMA"  # vLLM divides the cores itself
PROCESSORS = Path("/sys/devices/system/cpu")
STATUS = Path("/proc/self/status")
# Values of vLLM's flags for several workers.
SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
)


@dataclass(frozen=True)
class Workers:
    """The workers of a command line.

    Attributes:
        stages, ranks: numbers of pipeline stages and tensor-parallel ranks of an engine.
        engines: number of engines on this machine.
        count: number of workers on this machine.
        flags: the flags that request them, as a part of a sentence.
    """

    stages: int
    ranks: int
    engines: int
    count: int
    flags: str


def workers_of(arguments: Arguments) -> Workers:
    """The workers on this machine by vLLM's arguments.

    Raises:
        SettingError: a size is below 1, which vLLM refuses only after its start.
    """
    for name in (*SIZES, "nnodes"):
        if arguments.has(name) and (size := getattr(arguments, name)) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise SettingError(f"found {flag} {size}; expected a whole number from 1 on.")
    is_one = arguments.has("data_parallel_rank")  # one of several engines, started separately
    engines = arguments.data_parallel_size_local or (1 if is_one else arguments.data_parallel_size)
    stages, ranks = arguments.pipeline_parallel_size, arguments.tensor_parallel_size
    flags = [
        f"--{name.replace('_', '-')} {getattr(arguments, name)}"
        for name in SIZES
        if arguments.has(name)
    ]
    count = stages * ranks * arguments.prefill_context_parallel_size * engines
    count = max(count // arguments.nnodes, 1)
    return Workers(stages, ranks, engines, count, " with ".join(flags))


def bind(arguments: Arguments) -> str | None:
    """Divide the cores among the workers of this machine if vLLM would not.

    Args:
        arguments: of vLLM.

    Returns:
        The value set in ``VARIABLE``: lists of cores with ``|`` between them.  None if nothing is
        set: the user set it, there is a single worker, or each worker has a memory node.

    Raises:
        SettingError: there is no core for each worker, or the variable does not fit them.
    """
    if not device.is_cpu() or os.environ.get(SIMULATED, "0") != "0":
        return None
    workers, setting = workers_of(arguments), os.environ.get(VARIABLE, AUTO).strip()
    if setting == UNBOUND:
        return None
    available = _cores()
    if setting not in ("", AUTO):
        _check(setting, workers, [core for _, core in available])
        return None
    os.environ.pop(VARIABLE, None)
    nodes, memories = {node for node, _ in available}, _memory_nodes()
    has_node = workers.engines == 1 and workers.count <= len(memories) and memories <= nodes
    if workers.count == 1 or has_node:
        return None
    cores = [core for node, core in available if node in memories] or [
        core for _, core in available
    ]
    if len(cores) < workers.count:
        raise SettingError(
            f"{workers.flags} asks for {workers.count} workers on this machine, and this process "
            f"may use {_amount(cores)}, where each worker needs one of its own; ask for fewer "
            f"workers, allow it more cores, or set {VARIABLE}='{_shared(cores, workers.count)}' to "
            "have them share it, slowly."
        )
    os.environ[VARIABLE] = _divided(cores, workers)
    return os.environ[VARIABLE]


def _cores() -> list[tuple[int, int]]:
    """The memory node and the number of each core that this process may use, sorted.

    A core's number is that of its last logical processor, like in vLLM.
    """
    by_core: dict[tuple[int, str], int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        folder = PROCESSORS / f"cpu{processor}"
        node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
        siblings = _text(folder / "topology" / "thread_siblings_list") or str(processor)
        by_core[node, siblings] = processor
    return sorted((node, core) for (node, _), core in by_core.items())


def _memory_nodes() -> set[int]:
    """The memory nodes that vLLM sees; node 0 if the kernel lists none."""
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", _text(STATUS), re.M)
    nodes = set(_numbers(allowed[1]) if allowed else []) or {0}
    chosen = os.environ.get(NODES, "").strip()
    return nodes & set(_numbers(chosen)) if chosen else nodes


def _divided(cores: Sequence[int], workers: Workers) -> str:
    """One equal list of cores for each worker, minus reserved ones."""
    reserved = os.environ.get(RESERVED, "").strip()
    spare = int(reserved) * workers.engines // workers.count if reserved.isdecimal() else 1
    parts = []
    for worker in range(workers.count):
        begin, end = (len(cores) * (worker + n) // workers.count for n in (0, 1))
        parts.append(cores[begin : max(end - spare, begin + 1)])
    return "|".join(map(_ranges, parts))


def _shared(cores: Sequence[int], count: int) -> str:
    return "|".join(str(cores[worker % len(cores)]) for worker in range(count))


def _check(setting: str, workers: Workers, cores: Sequence[int]) -> None:
    """Raise SettingError unless a value of the variable lists usable cores for each worker.

    Other logical processors of a core are valid too.
    """
    parts = setting.split("|")
    expected = f"expected {workers.count} list{'s' * (workers.count > 1)} of cores"
    if workers.count > 1:
        expected += " with | between them"
    if workers.count <= len(cores):
        expected += f", such as '{_divided(cores, workers)}'"
    expected += f", or {UNBOUND}"
    lists = [_numbers(part) for part in parts]
    if not all(lists):
        raise SettingError(f"{VARIABLE} is {setting!r}, which are no lists of cores; {expected}.")
    if len(parts) != workers.count:
        flags = f" ({workers.flags})" if workers.flags else ""
        raise SettingError(
            f"{VARIABLE} is {setting!r}, the cores of {len(parts)}, and the number of workers on "
            f"this machine is {workers.count}{flags}; {expected}."
        )
    allowed = os.sched_getaffinity(0)
    for core in (core for numbers in lists for core in numbers if core not in allowed):
        raise SettingError(
            f"{VARIABLE} is {setting!r}, and this process may not use core {core}; {expected}."
        )


def _numbers(text: str) -> list[int]:
    """The numbers of a list such as ``0-3,8``; empty for anything else."""
    parsed: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not numbers:
            return []
        parsed += numbers
    return parsed


def _ranges(numbers: Sequence[int]) -> str:
    """The inverse of ``_numbers``, for ascending numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _amount(cores: Sequence[int]) -> str:
    return f"{len(cores)} core{'s' * (len(cores) > 1)} ({_ranges(cores)})"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
