"""Contenders started, measured and stopped, as often as the measurement has starts."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.bench.measure import DISCARDED, check_ran, measure, order
from attnres_serve.bench.process import Contender, running
from attnres_serve.bench.ratios import Results, overheads, told
from attnres_serve.bench.workload import Cell

MARGIN = 1.1  # of an estimate: starts of one measurement differ by some percent
BAR = "{desc} |{bar}| {remaining}{postfix}"  # leaves room for both ratios in 80 columns
TIMES = {"prefill": "TTFT", "decode": "TPOT"}  # what a ratio of a phase is of


@dataclass(frozen=True)
class Outcome:
    """Results of a session.

    Attributes:
        facts: of every start what each engine says of itself at the end (``engine.Bench.facts``).
        results: of every start the samples by cell and engine.
        took_s: seconds of all starts together.
    """

    facts: list[dict[str, dict[str, Any]]]
    results: list[Results]
    took_s: float

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        """The facts of the last start."""
        return self.facts[-1]


def run(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    starts: int,
    rounds: int,
    budget: float = inf,
    draw: Callable[[Cell, int], list[list[int]]] | None = None,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them, again and again.

    A terminal shows a bar with the ratios and their intervals of the starts so far.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        starts: as many as there is time for; the first is always finished.
        rounds: of each start, beside those discarded.
        budget: seconds that no start but the first may overrun, by the longest so far.
        draw: as of ``measure``.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    steps = len(contenders) * (1 + sum(cell.turns for cell in cells) * (rounds + DISCARDED))
    results: list[Results] = []
    told_of: list[dict[str, dict[str, Any]]] = []
    took: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        output.bar(total=starts * steps, bar_format=BAR) as bar,
    ):
        for number in range(starts):
            # The first start compiled, so it is an estimate only while there is no other.
            if number and sum(took) + MARGIN * max(took[1:] or took) > budget:
                break
            begin = time.monotonic()
            with ExitStack() as stack:
                named = {}
                # In another order each time: the first finds other free memory than the last.
                for contender in order(contenders, number):
                    bar.set_description_str(f"start {number + 1}/{starts}, {contender.name}")
                    started = running(contender, Path(folder))
                    named[contender.name] = stack.enter_context(started)
                    bar.update()
                bar.set_description_str(f"start {number + 1}/{starts}")
                engines = [named[contender.name] for contender in contenders]
                results.append(measure(engines, cells, rounds, number, bar.update, draw))
                told_of.append({engine.name: engine.ask("facts") for engine in engines})
                for engine in engines:
                    check_ran(engine, told_of[-1][engine.name])
            took.append(time.monotonic() - begin)
            if number or rounds > 1:  # one round has no interval
                bar.set_postfix_str(_so_far(results, contenders))
    return Outcome(told_of, results, sum(took))


def _so_far(results: Sequence[Results], contenders: Sequence[Contender]) -> str:
    """The ratios and their intervals."""
    baseline, *others = (contender.name for contender in contenders)
    ratios = (overheads(results, name, baseline) for name in others)
    return ", ".join(f"{TIMES[key]} {told(one[key])}" for one in ratios for key in one)
