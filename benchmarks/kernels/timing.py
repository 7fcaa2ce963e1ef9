"""Times kernels: CUDA graphs between events, cold L2, contenders in turn.

Every site of a contender is captured into a separate CUDA graph, as a server replays them, so no
figure has time of Python or of a dispatcher.  Before each one L2 is emptied, as the weights of
the sublayer between two sites empty it: a buffer of several times its size is written, and another
one read, so that what is evicted later has not to be written back; that also keeps the device busy
until the graph is queued.  The time of a block is the sum of its sites'.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks.kernels.contenders import Run
from benchmarks.kernels.gate import first_line

DISCARDED = 3  # rounds before those that count
_L2_TIMES = 4
COPY_BYTES = 2**30


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The names in the order of a round: each is first in its turn."""
    first = round_number % max(1, len(names))
    return [*names[first:], *names[:first]]


class ColdCache:
    """Empties L2.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: str) -> None:
        size = _L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
        self.bytes = size
        self._written = torch.empty(size // 4, dtype=torch.int32, device=device)
        self._read = torch.zeros_like(self._written)
        self._result = torch.empty((), dtype=torch.int32, device=device)

    def empty(self) -> None:
        self._written.zero_()
        torch.amax(self._read, 0, out=self._result)


def capture(run: Run) -> list[torch.cuda.CUDAGraph]:
    """A graph for every site.  The sites must have been called before: nothing may compile here.

    The graphs share one pool of memory, which replays in the order of the sites allow.
    """
    graphs: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()
    run.reset()
    torch.cuda.synchronize()
    # Not torch.cuda.graph, which empties the allocator's cache before each of thousands of graphs.
    with torch.cuda.stream(torch.cuda.Stream()):
        for site in run.sites:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                site()
            finally:
                graph.capture_end()
            graphs.append(graph)
    torch.cuda.synchronize()
    run.reset()
    return graphs


class Stopwatch:
    """Microseconds of graphs on the device, L2 cold before each."""

    def __init__(self, cache: ColdCache, most: int) -> None:
        self._cache = cache
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(most)
        ]

    def times(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        pairs = self._events[: len(graphs)]
        for graph, (begin, end) in zip(graphs, pairs, strict=True):
            self._cache.empty()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]


def measure(
    runs: dict[str, Run], rounds: int, stopwatch: Stopwatch
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Time contenders that the gate has called.

    Returns:
        Microseconds of every site, by contender, round after round; and of those that cannot be
        captured what they raised.
    """
    graphs, failures = {}, {}
    for name, run in runs.items():
        try:
            graphs[name] = capture(run)
        except Exception as error:  # another project's code may raise anything
            failures[name] = f"it cannot be captured: {first_line(error)}"
    samples = in_turn(
        {name: lambda name=name: stopwatch.times(graphs[name]) for name in graphs},
        {name: runs[name].reset for name in graphs},
        rounds,
    )
    return samples, failures


def in_turn(
    calls: dict[str, Callable[[], list[float]]],
    resets: dict[str, Callable[[], object]],
    rounds: int,
) -> dict[str, list[list[float]]]:
    """Call each in turn, its reset before it, in rotating order; the first rounds do not count."""
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(DISCARDED + rounds):
        for name in rotated(list(calls), number):
            resets[name]()
            times = calls[name]()
            if number >= DISCARDED:
                samples[name].append(times)
    return samples


def copy_bandwidth(stopwatch: Stopwatch, device: str) -> float:
    """Bytes a second of a copy on the device, read and written together.

    Of random bytes, as a device may move zeros faster; by the driver's copy or by a kernel that
    inverts them, whichever is faster.
    """
    source = torch.randint(-(2**63), 2**63 - 1, (COPY_BYTES // 8,), device=device)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    seconds = min(graph_time(copy, stopwatch) for copy in copies) / 1e6
    return 2 * COPY_BYTES / seconds


def launch_time(stopwatch: Stopwatch, device: str) -> float:
    """Microseconds that a graph with a kernel of next to no work takes between two events."""
    one = torch.zeros(1, device=device)
    return graph_time(lambda: one.add_(1), stopwatch)


def graph_time(call: Callable[[], Tensor], stopwatch: Stopwatch) -> float:
    """Microseconds of a call, captured; the median of 15."""
    call()
    graphs = capture(Run([call], partial_sum=call, reset=lambda: None))
    return median(stopwatch.times(graphs)[0] for _ in range(DISCARDED + 15))
