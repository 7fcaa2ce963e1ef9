"""A session: engines are started, measured and stopped, once for each start."""

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
from attnres_serve.bench.process import Engine, EngineSpec, running
from attnres_serve.bench.ratios import Results, overheads, ratio_text
from attnres_serve.bench.workload import Case
from attnres_serve.compat import device

MARGIN = 1.1  # of an estimate: starts of one measurement differ by some percent
EVIDENCE = 3  # starts from which an interval is meaningful
BAR = "{desc} |{bar}| {remaining}{postfix}"  # leaves space for both ratios in 80 columns
TIMES = {"prefill": "TTFT", "decode": "TPOT"}  # the time that is compared, by phase


@dataclass(frozen=True)
class Outcome:
    """The results of a session.

    Attributes:
        facts: for every start the facts of each engine at its end (``engine.Bench.facts``).
        results: for every start the samples by case and engine.
        took_s: seconds of all starts together.
        rounds: the rounds of each start.
        evidence_s: estimated seconds of ``EVIDENCE`` starts, if there were fewer.
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
    specs: Sequence[EngineSpec],
    cases: Sequence[Case],
    starts: int,
    rounds: int,
    budget: float = inf,
    draw: Callable[[Case, int], list[list[int]]] | None = None,
    caches: Path | None = None,
) -> Outcome:
    """Start all engines, measure them in turn, and stop them, once for each start.

    A terminal shows a bar with the ratios and their intervals so far.  If the budget is too small
    for ``EVIDENCE`` starts of this many rounds, there are fewer rounds.

    Args:
        specs: the engines; the first is the baseline.
        cases: the cases to measure.
        starts: the maximum number of starts; the first is always finished.
        rounds: the maximum number of counted rounds of each start.
        budget: seconds that only the first start may exceed.  The second start is estimated by
            the first without what it compiled, a later one by the longest after the first.
        draw: see ``measure``.
        caches: the folder for compiled code, which is kept; None for a temporary one.

    Raises:
        SettingError: an engine does not start, ends, or does not run as expected.
    """
    turns = sum(case.turns for case in cases)
    plan = Rounds(DISCARDED, rounds)
    needed = min(EVIDENCE, starts)
    evidence_s = inf
    saved_s = 0.0
    results: list[Results] = []
    facts: list[dict[str, dict[str, Any]]] = []
    took: list[float] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        output.bar(bar_format=BAR) as bar,
    ):
        for number in range(starts):
            if number and sum(took) + MARGIN * max(took[1:] or [took[0] - saved_s]) > budget:
                break
            begin = time.monotonic()
            asked = len(cases) * plan.discarded + turns * plan.counted
            bar.total = starts * len(specs) * (1 + asked)
            with ExitStack() as stack:
                label = f"start {number + 1}/{starts}"
                # In another order each time: the first engine starts with more free memory.
                turn, folder = order(specs, number), caches or Path(scratch)
                named = _start(stack, turn, folder, bar, label)
                if _is_mixed(named.values()):  # an interrupted session had compiled for one of them
                    stack.close()
                    saved_s = time.monotonic() - begin
                    named = _start(stack, turn, folder, bar, label)
                _tell(bar, label, f", {plan.counted} rounds")
                engines = [named[spec.name] for spec in specs]
                started_s = time.monotonic() - begin
                if not number:  # later starts load what this one compiled
                    each = [engine.at_start["saved_s"] for engine in engines]
                    saved_s += min(each) if device.is_cpu() else sum(each)  # see ``_start``
                starts_s = (started_s, *[started_s - saved_s] * (needed - 1))

                def fit(
                    short_s: float, round_s: float, starts_s: Sequence[float] = starts_s
                ) -> Rounds:
                    nonlocal plan, evidence_s
                    starts_s = [seconds + plan.discarded * short_s for seconds in starts_s]
                    fitted_plan = fitted(starts_s, round_s, plan, budget)
                    if fitted_plan != plan:
                        _tell(bar, f"rounds: {fitted_plan.counted}, for the budget")
                    plan, evidence_s = fitted_plan, seconds(starts_s, round_s, fitted_plan)
                    return plan

                fits = None if number else fit  # all starts have the same rounds
                results.append(measure(engines, cases, plan, number, bar.update, draw, fits))
                facts.append({engine.name: engine.ask("facts") for engine in engines})
                for engine in engines:
                    check_ran(engine, facts[-1][engine.name])
            took.append(time.monotonic() - begin)
            bar.set_postfix_str(_so_far(results, specs))
    missing = len(results) < needed
    return Outcome(facts, results, sum(took), plan, evidence_s if missing else None)


def _start(
    stack: ExitStack, specs: Sequence[EngineSpec], folder: Path, bar: Any, label: str
) -> dict[str, Engine]:
    """Running engines by name; the stack stops them."""
    named = {}
    for spec in specs:
        _tell(bar, f"{label}, {spec.name}")
        engine = named[spec.name] = stack.enter_context(running(spec, folder))
        if not device.is_cpu():  # each measures the free memory
            engine.wait()
    for engine in named.values():  # on a CPU they start concurrently
        engine.wait()
        bar.update()
    return named


def _is_mixed(engines: Iterable[Engine]) -> bool:
    """Whether some engines loaded compiled code and others compiled it; the speed may differ."""
    return len({engine.at_start["alike"]["code_loaded"] for engine in engines}) > 1


def seconds(starts_s: Sequence[float], round_s: float, rounds: Rounds) -> float:
    """The estimated seconds of all starts, with ``MARGIN``.

    Args:
        starts_s: the seconds of each start before its first counted round.
        round_s: the seconds of a counted round.
        rounds: the rounds of a start.
    """
    return MARGIN * (sum(starts_s) + len(starts_s) * rounds.counted * round_s)


def fitted(starts_s: Sequence[float], round_s: float, most: Rounds, budget: float) -> Rounds:
    """The most counted rounds with which starts fit into a budget; at least one.

    Args:
        starts_s, round_s: see ``seconds``.
        most: the maximum rounds.
        budget: seconds for all starts.
    """
    plans = [Rounds(most.discarded, counted) for counted in range(most.counted, 0, -1)]
    return next((plan for plan in plans if seconds(starts_s, round_s, plan) <= budget), plans[-1])


def _tell(bar: Any, what: str, more: str = "") -> None:
    """Show the current step on a terminal; otherwise write it, with ``more``."""
    bar.set_description_str(what + (more if bar.disable else ""))


def _so_far(results: Sequence[Results], specs: Sequence[EngineSpec]) -> str:
    """The ratios and their intervals."""
    baseline, *others = (spec.name for spec in specs)
    ratios = (overheads(results, name, baseline) for name in others)
    return ", ".join(f"{TIMES[key]} {ratio_text(one[key])}" for one in ratios for key in one)
