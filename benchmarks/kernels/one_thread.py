"""What the benchmarks on one thread of a CPU share: turns, and a document of cells."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnres_serve.compat.workarounds import malloc
from benchmarks.common import publish


def in_turn(
    calls: Mapping[str, Callable[[], float]], repeats: int, rounds: int
) -> list[dict[str, float]]:
    """The shortest seconds of each call in every round, in alternating order; each is warm then.

    Args:
        calls: by name, what gives the seconds that it took.
        repeats: calls of each in a round.
        rounds: as many dictionaries are returned.
    """
    for call in calls.values():
        call()
    times = []
    for number in range(rounds):
        turns = [*calls.items()][:: -1 if number % 2 else 1]
        times.append({name: min(call() for _ in range(repeats)) for name, call in turns})
    return times


def run(
    name: str,
    about: str,
    arguments: list[str] | None,
    cells: Sequence[Any],
    measure: Callable[[Any, int], dict[str, Any]],
    lines: Callable[[list[dict[str, Any]]], list[str]],
    layers: int,
) -> int:
    """Measure every cell and print one JSON document.

    Args:
        name: of the benchmark.
        about: its first sentence.
        arguments: of the command line; None for those of this process.
        cells: what is measured.
        measure: the row of a cell, from rounds.
        lines: the table of rows.
        layers: of a call.
    """
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    malloc.keep_freed()
    torch.set_num_threads(1)
    results = []
    for cell in cells:
        row = measure(cell, options.rounds)
        results.append(row)
        print(lines([row])[-1], file=sys.stderr)
    config = {"layers": layers, "rounds": options.rounds, "threads": 1}
    publish(name, arguments, options.out, config=config, results=results)
    return 0
