"""Contenders started, measured and stopped, as often as the measurement has starts."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.bench.measure import DISCARDED, check_ran, measure, order
from attnres_serve.bench.process import Contender, Engine, running
from attnres_serve.bench.ratios import Results, overheads, told
from attnres_serve.bench.workload import Cell

MARGIN = 1.1  # of an estimate: starts of one measurement differ by some percent


@dataclass(frozen=True)
class Outcome:
    """Results of a session.

    Attributes:
        engines: what each engine says of itself at the end of the first start
            (``engine.Bench.facts``), which alone has nothing compiled beforehand.
        results: of every start the samples by cell and engine.
        took_s: seconds of all starts together.
    """

    engines: dict[str, dict[str, Any]]
    results: list[Results]
    took_s: float


def run(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    starts: int,
    rounds: int,
    threads: int,
    cache: str | None = None,
    budget: float = inf,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them, again and again.

    A terminal shows a bar with the ratios and their intervals as they narrow.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        starts: as many as there is time for; the first is always finished.
        rounds: of each start, beside those discarded.
        threads: of each engine on CPU.
        cache: folder that keeps what was compiled; None for one that the starts of this run share.
        budget: seconds that no start but the first may overrun, by the longest so far.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    baseline, *others = (contender.name for contender in contenders)
    requests = len(contenders) * (1 + sum(cell.turns for cell in cells) * (rounds + DISCARDED))
    results: list[Results] = []
    took: list[float] = []
    facts: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        output.bar(total=starts * requests, unit="request") as bar,
    ):

        def step(what: str) -> None:
            bar.set_description(f"start {len(took) + 1} of {starts}, {what}")
            bar.update()

        def show(found: Sequence[Results]) -> None:
            ratios = {name: overheads(found, name, baseline) for name in others}
            bar.set_postfix_str(_ratios(ratios))

        compiled = Path(cache or Path(folder) / "cache").absolute()
        for number in range(starts):
            # The first start compiled, so it is an estimate only while there is no other.
            if number and sum(took) + MARGIN * max(took[1:] or took) > budget:
                break
            begin = time.monotonic()
            with _started(contenders, number, threads, Path(folder), compiled, step) as engines:
                for made, found in enumerate(measure(engines, cells, rounds, number, step)):
                    if number == 0 and made:  # one round has no interval
                        show([found])
                at_end = {engine.name: engine.ask("facts") for engine in engines}
                for engine in engines:
                    check_ran(engine, at_end[engine.name])
            results.append(found)
            facts = facts or at_end
            took.append(time.monotonic() - begin)
            show(results)
    return Outcome(facts, results, sum(took))


def _ratios(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    return ", ".join(
        (f"{name} " if len(found) > 1 else "") + f"{phase} {told(one)}"
        for name, phases in found.items()
        for phase, one in phases.items()
    )


@contextmanager
def _started(
    contenders: Sequence[Contender],
    number: int,
    threads: int,
    scratch: Path,
    compiled: Path,
    step: Callable[[str], object],
) -> Iterator[list[Engine]]:
    """Start number ``number``: every contender in a new process, in the order they were given.

    They are started in another order each time, because the first finds other free memory than the
    last.
    """
    with ExitStack() as stack:
        engines = {}
        for contender in order(contenders, number):
            step(f"starting {contender.name}")
            own = compiled / contender.name  # so that no engine starts faster by another's code
            engine = running(contender, scratch / contender.name, own, threads)
            engines[contender.name] = stack.enter_context(engine)
        yield [engines[contender.name] for contender in contenders]
