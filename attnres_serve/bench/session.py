"""Contenders started, measured and stopped, as often as the measurement has starts."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres_serve.bench import breakdown
from attnres_serve.bench.budget import Budget, clock_time, next_start
from attnres_serve.bench.length import FEWEST_ROUNDS, ROUNDS_OF_ONE, Length
from attnres_serve.bench.measure import DISCARDED, Results, check_ran, measure, order
from attnres_serve.bench.memory import pieces_held
from attnres_serve.bench.overhead import widest
from attnres_serve.bench.process import Contender, Engine, running
from attnres_serve.bench.progress import Progress
from attnres_serve.bench.workload import Cell
from attnres_serve.formats.parsed_config import ParsedConfig

STARTS, WIDTH, BUDGET = "starts", "width", "budget"  # what ends a measurement


@dataclass(frozen=True)
class Outcome:
    """Results of a session.

    Attributes:
        engines: what each engine says of itself at the end of the first start
            (``engine.Bench.facts``), which alone has nothing compiled beforehand.
        results: of every start the samples by cell and engine.
        breakdown: where the time goes in the first start, by cell and engine; None where
            ``breakdown.measure`` cannot tell, or was not asked.
        ended_by: STARTS, as many as were asked for or the most there may be; WIDTH, every interval
            is narrow enough; or BUDGET, another start would have overrun it.
        took_s: seconds of the budget that were spent.
    """

    engines: dict[str, dict[str, Any]]
    results: list[Results]
    breakdown: list[dict[str, Any]] | None
    ended_by: str
    took_s: float

    @property
    def rounds(self) -> int:
        """Rounds of each start that count."""
        samples = next(iter(self.results[0].values()))
        return len(next(iter(samples.values())).turns)


def run(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    length: Length,
    threads: int,
    parsed: ParsedConfig | None,
    cache: str | None = None,
    budget: Budget | None = None,
    tells_ratios: bool = True,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them, again and again.

    It ends when ``length`` says it is enough, or before a start that ``budget`` has no room for.
    At least one start is finished.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        length: starts, and the rounds of each.
        threads: of each engine on CPU.
        parsed: what the AttnRes contenders' config.json means; None leaves the profile out.
        cache: folder that keeps what was compiled; None for one that the starts of this run share.
        budget: None for none.  The profile's time does not count.
        tells_ratios: whether ratios are shown while it runs.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    budget = budget or Budget()
    names = [contender.name for contender in contenders]
    requests = len(names) * (1 + sum(cell.turns for cell in cells) * (length.rounds + DISCARDED))
    results: list[Results] = []
    took: list[float] = []
    facts: dict[str, dict[str, Any]] = {}
    shares, ended_by = None, None
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(budget, names, requests, tells_ratios) as progress,
    ):
        scratch = Path(folder)
        compiled = Path(cache or scratch / "cache").absolute()
        while ended_by is None:
            number, begin = len(results), budget.spent
            progress.start()
            with _started(contenders, number, threads, scratch, compiled, progress.step) as engines:
                results.append(_ask(engines, cells, length, number, begin, progress))
                # Before the profiler, whose events would be the largest part of the peak.
                at_end = {engine.name: engine.ask("facts") for engine in engines}
                for engine in engines:
                    check_ran(engine, at_end[engine.name])
                if number == 0:
                    facts = at_end
                    if parsed:
                        with budget.paused():
                            shares = breakdown.measure(engines, cells, parsed, progress.step)
            took.append(budget.spent - begin)
            progress.end_of_start(results)
            ended_by = _end(length, results, names, budget, took)
    return Outcome(facts, results, shares, ended_by, budget.spent)


def _ask(
    engines: Sequence[Engine],
    cells: Sequence[Cell],
    length: Length,
    number: int,
    begin: float,
    progress: Progress,
) -> Results:
    """The rounds of one start, which began when ``begin`` seconds of the budget were spent."""
    budget, up = progress.budget, progress.budget.spent
    for made, found in enumerate(measure(engines, cells, length.rounds, number, progress.step), 1):
        each = (budget.spent - up) / (made + DISCARDED)
        if number == 0 and made == 1:
            expected = budget.spent + (max(length.rounds, FEWEST_ROUNDS) - made) * each
            if expected > budget.seconds:
                progress.say(
                    f"One start of all engines takes about {clock_time(expected)} minutes, more "
                    f"than the budget of {clock_time(budget.seconds)}. It is finished, and the "
                    "measurement ends with it."
                )
        elif number == 0:
            progress.show([found])
        if made >= length.rounds and (number > 0 or not _goes_on(made, each, begin, budget)):
            return found
    raise AssertionError("rounds have no end")


def _goes_on(made: int, each: float, begin: float, budget: Budget) -> bool:
    """True if the first start takes another round, because there is no room for a second start.

    It takes as many as an interval needs, and more while there is room, up to those of a single
    start.

    Args:
        made: rounds.
        each: seconds of a round.
        begin: seconds of the budget that were spent when the start began.
        budget: what is left of it.
    """
    if budget.has_room_for(budget.spent - begin):
        return False
    return made < FEWEST_ROUNDS or (made < ROUNDS_OF_ONE and budget.has_room_for(each))


def _end(
    length: Length,
    results: Sequence[Results],
    names: Sequence[str],
    budget: Budget,
    took: Sequence[float],
) -> str | None:
    """The reason to end a measurement after these starts; None if it goes on."""
    baseline, *others = names

    def half_width() -> float:
        return widest(results, others, baseline)

    if length.is_enough(len(results), half_width):
        is_narrow = length.until is not None and half_width() <= length.until.half_width
        return WIDTH if is_narrow else STARTS
    return None if budget.has_room_for(next_start(took)) else BUDGET


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
    last; and each time free memory in pieces is held anew, because engines that end leave some.
    """
    with ExitStack() as stack:
        stack.enter_context(pieces_held())
        engines = {}
        for contender in order(contenders, number):
            step(f"starting {contender.name}")
            own = compiled / contender.name  # so that no engine starts faster by another's code
            engine = running(contender, scratch / contender.name, own, threads)
            engines[contender.name] = stack.enter_context(engine)
        yield [engines[contender.name] for contender in contenders]
