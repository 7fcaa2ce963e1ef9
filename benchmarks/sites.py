"""What one site costs on CPU, outside any engine: the cpp backend's operators and add + RMSNorm.

    python -m benchmarks.sites --out benchmarks/results/cpu-sites.json

Microseconds of a call from Python in bfloat16, the dispatch included; phase 1 is given per site of
a block of eight.  All columns are timed in turn, round after round.  The last line on stdout is one
JSON document; the table goes to stderr.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from attnres_serve.kernels import backends
from attnres_serve.kernels.backends import SiteWeights
from benchmarks.common import publish, spread

SITES = 8  # that share a phase 1
COLUMNS = ("add + RMSNorm", "single pass", "phase 1", "merge")


def calls(tokens: int, sources: int, hidden: int) -> dict[str, Callable[[], object]]:
    """One call of each column on fresh random inputs."""
    cpp = backends.load("cpp")

    def rows() -> torch.Tensor:
        return torch.randn(tokens, hidden).bfloat16()

    blocks = [rows() for _ in range(sources - 1)]
    partial, delta, norm = rows(), rows(), torch.ones(hidden).bfloat16()
    site = SiteWeights(torch.randn(hidden), torch.ones(hidden), 1.0, 1e-6, None, norm, 1e-6)
    answers = cpp.inter_block(blocks, [site] * SITES)
    return {
        "add + RMSNorm": lambda: torch.rms_norm(partial + delta, (hidden,), norm, 1e-6),
        "single pass": lambda: cpp.single_pass(blocks, partial, delta, site),
        "phase 1": lambda: cpp.inter_block(blocks, [site] * SITES),
        "merge": lambda: cpp.merge(answers, 3, partial, delta, site),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = parser.parse_args(arguments)
    results = []
    print(f"{'tokens':>6} {'sources':>7} " + " ".join(f"{c:>22}" for c in COLUMNS), file=sys.stderr)
    for tokens in (1, 8, 512):
        for sources in (2, 5, 9):
            run = calls(tokens, sources, own.hidden)
            repeats = 500 if tokens < 100 else 10
            for call in run.values():
                microseconds(call, repeats)
            rounds = [
                {column: microseconds(call, repeats) for column, call in run.items()}
                for _ in range(own.rounds)
            ]
            cells = []
            for column in COLUMNS:
                share = SITES if column == "phase 1" else 1
                every = sorted(one[column] / share for one in rounds)
                row = {"tokens": tokens, "sources": sources, "column": column}
                results.append(row | {"microseconds": spread(every)})
                cells.append(f"{median(every):.1f} ({every[0]:.1f} to {every[-1]:.1f})")
            print(
                f"{tokens:>6} {sources:>7} " + " ".join(f"{c:>22}" for c in cells), file=sys.stderr
            )
    config = {"hidden": own.hidden, "rounds": own.rounds, "dtype": "bfloat16", "sites": SITES}
    config["threads"] = torch.get_num_threads()
    publish("sites", arguments, own.out, config=config, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
