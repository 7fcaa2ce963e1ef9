"""Cost of one site on CPU, outside any engine: the cpp backend's operators and add + RMSNorm.

    python -m benchmarks.kernels.cpu_sites --out benchmarks/results/cpu-sites.json

Microseconds of a call from Python in bfloat16, the dispatch included; the first site of a group of
eight, with their phase 1, is given per site.  All columns are timed in turn, round after round.
*Warm*: call after call, one thread or more.  *Cold*: before each call the weights of a sublayer
pass through the caches, as in decode; one thread, and the time of the call alone.  The last line on
stdout is one JSON document; the table goes to stderr.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import SiteWeights, slot_of
from benchmarks.common import publish, spread

SITES = 8  # of a group
COLUMNS = ("add + RMSNorm", "single pass", "open group", "merge")
SUBLAYER = 4096  # columns of the matrix that passes through the caches


def calls(tokens: int, sources: int, hidden: int) -> dict[str, Callable[[], object]]:
    """One call of each column on fresh random inputs."""
    cpp = backends.load("cpp")

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, hidden).bfloat16()

    bank, partial, x, norm = rows(sources), rows(), rows(), torch.ones(hidden).bfloat16()
    site = SiteWeights(torch.randn(hidden), torch.ones(hidden), None, norm, 1.0, 1e-6, 1e-6)
    queries = cpp.queries_of([site] * SITES)
    group = queries, SITES, site, slot_of(sources - 1, fresh=True), True
    _, answers = cpp.phase_1(x, bank, *group)
    own = queries, site, slot_of(sources - 1, fresh=True, position=3, first=sources - 1, number=3)
    return {
        "add + RMSNorm": lambda: torch.rms_norm(partial + x, (hidden,), norm, 1e-6),
        "single pass": lambda: cpp.single_pass(x, bank, *own),
        "open group": lambda: cpp.phase_1(x, bank, *group),
        "merge": lambda: cpp.phase_2(x, bank, answers, *own),
    }


def warm(call: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


def cold(call: Callable[[], object], weights: list[torch.Tensor]) -> float:
    """The median of one call for each of the matrices that pass before it."""
    x = torch.randn(1, weights[0].shape[0]).bfloat16()
    taken = []
    for weight in weights:
        torch.mm(x, weight)
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
    return median(taken)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    weights = [torch.randn(own.hidden, SUBLAYER).bfloat16() for _ in range(24)]
    results = []
    heads = " ".join(f"{column:>22}" for column in COLUMNS)
    print(f"{'':>4} {'tokens':>6} {'sources':>7} {heads}", file=sys.stderr)
    for caches, tokens in (("warm", 1), ("warm", 8), ("warm", 512), ("cold", 1)):
        torch.set_num_threads(1 if caches == "cold" else threads)
        for sources in (2, 5, 9):
            run = calls(tokens, sources, own.hidden)
            repeats = 500 if tokens < 100 else 10

            def once(call: Callable[[], object], cold_one=caches == "cold", n=repeats) -> float:
                return cold(call, weights) if cold_one else warm(call, n)

            for call in run.values():
                once(call)
            rounds = [
                {column: once(call) for column, call in run.items()} for _ in range(own.rounds)
            ]
            cells = []
            for column in COLUMNS:
                share = SITES if column == "open group" else 1
                every = sorted(one[column] / share for one in rounds)
                row = {"caches": caches, "tokens": tokens, "sources": sources, "column": column}
                results.append(row | {"microseconds": spread(every)})
                cells.append(f"{median(every):.1f} ({every[0]:.1f} to {every[-1]:.1f})")
            row = " ".join(f"{cell:>22}" for cell in cells)
            print(f"{caches:>4} {tokens:>6} {sources:>7} {row}", file=sys.stderr)
    torch.set_num_threads(threads)
    config = {"hidden": own.hidden, "rounds": own.rounds, "dtype": "bfloat16", "sites": SITES}
    config["threads"] = threads
    publish("sites", arguments, own.out, config=config, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
