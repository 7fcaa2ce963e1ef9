"""Contenders started, measured and stopped, as often as the measurement has starts."""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.bench.measure import DISCARDED, Rounds, check_ran, measure, order
from attnres_serve.bench.process import Contender, Engine, running
from attnres_serve.bench.ratios import Results, overheads, told
from attnres_serve.bench.workload import Cell
from attnres_serve.compat import device

MARGIN = 1.1  # of an estimate: starts of one measurement differ by some percent
EVIDENCE = 3  # starts, of which an interval says something
AGAIN = 0.4  # share of the seconds of a start that compiled, before it measures, for a later one
BAR = "{desc} |{bar}| {remaining}{postfix}"  # leaves room for both ratios in 80 columns
TIMES = {"prefill": "TTFT", "decode": "TPOT"}  # what a ratio of a phase is of


@dataclass(frozen=True)
class Outcome:
    """Results of a session.

    Attributes:
        facts: of every start what each engine says of itself at the end (``engine.Bench.facts``).
        results: of every start the samples by cell and engine.
        took_s: seconds of all starts together.
        rounds: of each start.
        evidence_s: about how many seconds ``EVIDENCE`` starts take, where there were fewer.
    """

    facts: list[dict[str, dict[str, Any]]]
    results: list[Results]
    took_s: float
    rounds: Rounds
    evidence_s: float | None

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
    caches: Path | None = None,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them, again and again.

    A terminal shows a bar with the ratios and their intervals of the starts so far.  Where the
    budget has no room for ``EVIDENCE`` starts of so many rounds, there are fewer rounds.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        starts: as many as there is time for; the first is always finished.
        rounds: of each start, at most, beside those discarded.
        budget: seconds that no start but the first may overrun, by the longest so far.
        draw: as of ``measure``.
        caches: the folder for compiled code, which stays; None for one of this session.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    turns = sum(cell.turns for cell in cells)
    plan = Rounds(DISCARDED, rounds)
    needed = min(EVIDENCE, starts)
    evidence_s = inf
    saved_s = 0.0
    results: list[Results] = []
    told_of: list[dict[str, dict[str, Any]]] = []
    took: list[float] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        output.bar(bar_format=BAR) as bar,
    ):
        for number in range(starts):
            if number and sum(took) + MARGIN * max(took[1:] or [took[0] - saved_s]) > budget:
                break
            begin = time.monotonic()
            bar.total = starts * len(contenders) * (1 + turns * sum(plan))
            with ExitStack() as stack:
                said = f"start {number + 1}/{starts}"
                # In another order each time: the first finds other free memory than the last.
                turn, folder = order(contenders, number), caches or Path(scratch)
                named = _start(stack, turn, folder, bar, said)
                if _is_mixed(named.values()):  # one had compiled before, by an interrupted session
                    stack.close()
                    named = _start(stack, turn, folder, bar, said)
                _tell(bar, said, f", {sum(plan)} rounds")
                engines = [named[contender.name] for contender in contenders]
                started_s = time.monotonic() - begin
                if not number and not engines[0].at_start["alike"]["code_loaded"]:
                    saved_s = (1 - AGAIN) * started_s  # no later one compiles
                starts_s = (started_s, *[started_s - saved_s] * (needed - 1))

                def fit(round_s: float, starts_s: Sequence[float] = starts_s) -> Rounds:
                    nonlocal plan, evidence_s
                    found = fitted(starts_s, round_s, plan, budget)
                    if found != plan:
                        _tell(bar, f"{found.counted} rounds of {round_s:.0f} s, for the budget")
                    plan, evidence_s = found, seconds(starts_s, round_s, found)
                    return plan

                fits = None if number else fit  # all starts have as many
                results.append(measure(engines, cells, plan, number, bar.update, draw, fits))
                told_of.append({engine.name: engine.ask("facts") for engine in engines})
                for engine in engines:
                    check_ran(engine, told_of[-1][engine.name])
            took.append(time.monotonic() - begin)
            bar.set_postfix_str(_so_far(results, contenders))
    missing = len(results) < needed
    return Outcome(told_of, results, sum(took), plan, evidence_s if missing else None)


def _start(
    stack: ExitStack, contenders: Sequence[Contender], folder: Path, bar: Any, said: str
) -> dict[str, Engine]:
    """Engines that run, by their names; the stack stops them."""
    named = {}
    for contender in contenders:
        _tell(bar, f"{said}, {contender.name}")
        engine = named[contender.name] = stack.enter_context(running(contender, folder))
        if not device.is_cpu():  # each measures the memory that is free
            engine.wait()
    for engine in named.values():  # on a CPU they start side by side
        engine.wait()
        bar.update()
    return named


def _is_mixed(engines: Iterable[Engine]) -> bool:
    """Whether some loaded compiled code and others compiled it, which need not be as fast."""
    return len({engine.at_start["alike"]["code_loaded"] for engine in engines}) > 1


def seconds(starts_s: Sequence[float], round_s: float, rounds: Rounds) -> float:
    """About how long starts take together, with ``MARGIN``: as much as they are given.

    Args:
        starts_s: what each takes before its first round.
        round_s: of a round.
        rounds: of a start.
    """
    return MARGIN * (sum(starts_s) + len(starts_s) * sum(rounds) * round_s)


def fitted(starts_s: Sequence[float], round_s: float, most: Rounds, budget: float) -> Rounds:
    """The most rounds with which starts fit into a budget; one of each kind if none does.

    Args:
        starts_s, round_s: as of ``seconds``.
        most: rounds that there may be.
        budget: seconds for all.
    """
    plans = [Rounds(most.discarded, counted) for counted in range(most.counted, 0, -1)]
    for plan in plans:
        if seconds(starts_s, round_s, plan) <= budget:
            return plan
    return Rounds(1, 1)


def _tell(bar: Any, what: str, more: str = "") -> None:
    """Show on a terminal what is done, and write it elsewhere, with ``more``."""
    bar.set_description_str(what + (more if bar.disable else ""))


def _so_far(results: Sequence[Results], contenders: Sequence[Contender]) -> str:
    """The ratios and their intervals."""
    baseline, *others = (contender.name for contender in contenders)
    ratios = (overheads(results, name, baseline) for name in others)
    return ", ".join(f"{TIMES[key]} {told(one[key])}" for one in ratios for key in one)
