"""Contenders started, measured and stopped."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnres_serve.bench import breakdown
from attnres_serve.bench.measure import DISCARDED, Results, check_ran, measure
from attnres_serve.bench.memory import pieces_held
from attnres_serve.bench.process import Contender, running
from attnres_serve.bench.workload import Cell
from attnres_serve.formats.translation import Translation


@dataclass(frozen=True)
class Outcome:
    """What a session found.

    Attributes:
        engines: what each engine says of itself at the end (``engine.Bench.facts``).
        results: the samples by cell and engine.
        breakdown: where the time goes, by cell and engine; None where ``breakdown.measure`` cannot
            tell, or was not asked.
    """

    engines: dict[str, dict[str, Any]]
    results: Results
    breakdown: list[dict[str, Any]] | None


def run(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    rounds: int,
    threads: int,
    translation: Translation | None,
    cache: str | None = None,
) -> Outcome:
    """Start every contender, ask them in turn, and stop them.

    Args:
        contenders: the first is the baseline.
        cells: what to ask for.
        rounds: how often, beside those discarded.
        threads: of each engine on CPU.
        translation: what the AttnRes contenders' config.json means; None leaves the profile out.
        cache: folder that keeps what was compiled; None for a temporary one.

    Raises:
        SettingError: an engine does not start, ends, or is not what it should be.
    """
    turns = sum(cell.turns for cell in cells)
    profiles = breakdown.REPEATS * len(cells) if translation else 0
    total = len(contenders) * (1 + turns * (rounds + DISCARDED) + profiles)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bar = stack.enter_context(tqdm(total=total, unit="request"))

        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        stack.enter_context(pieces_held())
        engines = []
        for contender in contenders:
            step(f"starting {contender.name}")
            log, compiled = scratch / contender.name, Path(cache or scratch / "cache").absolute()
            compiled /= contender.name  # so that no engine starts faster by another's code
            engines.append(stack.enter_context(running(contender, log, compiled, threads)))
        results = measure(engines, cells, rounds, step)
        # Before the profiler, whose events would be the largest part of the peak.
        facts = {engine.name: engine.ask("facts") for engine in engines}
        for engine in engines:
            check_ran(engine, facts[engine.name])
        shares = breakdown.measure(engines, cells, translation, step) if translation else None
    return Outcome(facts, results, shares)
