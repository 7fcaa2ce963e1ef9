"""Cost of the recurrence of linear attention in decode, against reading and writing its state.

    python -m benchmarks.kernels.recurrence --out benchmarks/results/cpu-recurrence.json

A step of decode reads each sequence's state and writes it, whatever else it does.  *Memory*: torch
multiplies the same blocks by a number, in place.  *C++* and *torch*: the operator as layers of Kimi
Delta Attention call it, with bfloat16 activations.  Layers follow one another, of more state than
the caches hold, as in a model.  The columns take turns, step by step, and a ratio is of two
neighbours: on a machine with other work both see the same load.  The last line on stdout is one
JSON document; the table goes to stderr.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import normalize

from attnres_serve.kernels.recurrence import in_torch, prepare, recurrence
from benchmarks.common import publish, spread

CELLS = [(heads, 128, batch) for heads in (8, 16, 32, 64) for batch in (1, 8)]
CELLS += [(32, size, batch) for size in (64, 256) for batch in (1, 8)]
CELLS += [(32, 80, 1)]  # a size without loops of its own
STATE = 192 * 2**20  # bytes of all layers


def columns(heads: int, size: int, batch: int) -> dict[str, list[Callable[[], object]]]:
    """For each column the calls of one step, one for each layer."""
    layers = max(2, STATE // (heads * size * size * batch * 4))
    states = [torch.randn(1 + batch, heads, size, size) for _ in range(layers)]
    q, k = (normalize(torch.randn(batch, heads, size), dim=-1) for _ in range(2))
    v = torch.randn(batch, heads, size).bfloat16()
    decay, beta = torch.rand(batch, heads, size), torch.rand(batch, heads)
    slots, starts = torch.arange(1, 1 + batch).int(), torch.arange(1 + batch).int()
    rest = slots, starts, torch.ones(batch, dtype=torch.bool), size**-0.5

    def calls(by: Callable[..., object]) -> list[Callable[[], object]]:
        return [lambda own=own: by(q, k, v, decay, beta, own, *rest) for own in states]

    return {
        "memory": [lambda own=own[1:]: own.mul_(0.999) for own in states],
        "C++": calls(recurrence),
        "torch": calls(in_torch.recurrence),
    }


def steps(run: dict[str, list[Callable[[], object]]], seconds: float) -> dict[str, list[float]]:
    """Microseconds of a layer, by column and turn, for so many seconds."""
    taken: dict[str, list[float]] = {name: [] for name in run}
    layers, turn, end = len(run["memory"]), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or turn < 2 * layers:
        for number, (name, calls) in enumerate(run.items()):
            # Each column is a third of the layers away from the others: none finds a warm state.
            call = calls[(turn + number * layers // 3) % layers]
            begin = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - begin) * 1e6)
        turn += 1
    return {name: every[layers:] for name, every in taken.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=5, help="of a cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = parser.parse_args(arguments)
    if (problem := prepare()) is not None:
        parser.error(problem)
    threads = torch.get_num_threads()
    torch.set_num_threads(own.threads)
    results = []
    header = "heads size batch  memory us    C++ us     ratio (quartiles)  torch us"
    print(header, file=sys.stderr)
    for heads, size, batch in CELLS:
        taken = steps(columns(heads, size, batch), own.seconds)
        ratios = sorted(b / a for a, b in zip(taken["memory"], taken["C++"], strict=True))
        quarter = len(ratios) // 4
        row = {
            "heads": heads,
            "size": size,
            "batch": batch,
            "state_bytes": 4 * heads * size * size * batch,
            "turns": len(ratios),
            "microseconds": {name: spread(every) for name, every in taken.items()},
            "ratio": {
                "median": median(ratios),
                "quartiles": [ratios[quarter], ratios[-1 - quarter]],
                "of_minima": min(taken["C++"]) / min(taken["memory"]),
            },
        }
        results.append(row)
        times = {name: f"{median(every):9.1f}" for name, every in taken.items()}
        quartiles = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        print(
            f"{heads:5} {size:4} {batch:5} {times['memory']:>10} {times['C++']:>9} "
            f"{median(ratios):6.2f} ({quartiles}) {times['torch']:>9}",
            file=sys.stderr,
        )
    torch.set_num_threads(threads)
    config = {"threads": own.threads, "dtype": "bfloat16", "seconds": own.seconds}
    publish("kernels.recurrence", arguments, own.out, config=config, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
