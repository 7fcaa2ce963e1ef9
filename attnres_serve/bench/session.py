"""Contenders started, measured and stopped, as often as the measurement has starts."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnres_serve.bench import breakdown
from attnres_serve.bench.length import Length
from attnres_serve.bench.measure import DISCARDED, Results, check_ran, measure, order
from attnres_serve.bench.memory import pieces_held
from attnres_serve.bench.overhead import widest
from attnres_serve.bench.process import Contender, Engine, running
from attnres_serve.bench.workload import Cell
from attnres_serve.formats.translation import Translation


@dataclass(frozen=True)
class Outcome:
    """What a session found.

    Attributes:
        engines: what each engine says of itself at the end of the first start
            (``engine.Bench.facts``), which alone has nothing compiled beforehand.
        results: of every start the samples by cell and engine.
        breakdown: where the time goes in the first start, by cell and engine; None where
            ``breakdown.measure`` cannot tell, or was not asked.
    """

    engines: dict[str, dict[str, Any]]
    results: list[Results]
    breakdown: list[dict[str, Any]] | None


def run(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    length: Length,
    threads: int,
    translation: Translation | None,
    cache: str | None = None,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them; until ``length`` says it is enough.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        length: starts, and the rounds of each.
        threads: of each engine on CPU.
        translation: what the AttnRes contenders' config.json means; None leaves the profile out.
        cache: folder that keeps what was compiled; None for one that the starts of this run share.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    baseline, *others = (contender.name for contender in contenders)
    turns = sum(cell.turns for cell in cells) * (length.rounds + DISCARDED)
    each = len(contenders) * (1 + turns)
    profiles = len(contenders) * breakdown.REPEATS * len(cells) if translation else 0
    results: list[Results] = []
    facts: dict[str, dict[str, Any]] = {}
    shares = None
    total = each * length.starts + profiles
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit="request") as bar:
        scratch = Path(folder)
        compiled = Path(cache or scratch / "cache").absolute()

        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        for number in itertools.count():
            with _started(contenders, number, threads, scratch, compiled, step) as engines:
                results.append(measure(engines, cells, length.rounds, number, step))
                # Before the profiler, whose events would be the largest part of the peak.
                at_end = {engine.name: engine.ask("facts") for engine in engines}
                for engine in engines:
                    check_ran(engine, at_end[engine.name])
                if number == 0:
                    facts = at_end
                    if translation:
                        shares = breakdown.measure(engines, cells, translation, step)
            if length.is_enough(number + 1, lambda: widest(results, others, baseline)):
                break
            if number + 1 >= length.starts:
                bar.set_description(f"known to {widest(results, others, baseline):.1%}")
                bar.total += each
    return Outcome(facts, results, shares)


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
