"""Engines asked in turn, cell by cell, all with the same fresh prompts."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from attnres_serve.bench.process import Engine
from attnres_serve.bench.ratios import Results, Samples
from attnres_serve.bench.workload import UNTIMED, WARM, WARM_TOKENS, Cell, draw_prompts
from attnres_serve.errors import SettingError
from attnres_serve.settings import AUTO

PROCEDURE = 6  # moves when a figure's meaning does: documents of two are not to be compared
DISCARDED = 2  # rounds of every start before those that count, where there is time
# What vLLM may choose otherwise where there are drafts, which is a part of their cost.
BY_DRAFTS = ("async_scheduling", "cuda_graphs", "max_num_batched_tokens")
One = TypeVar("One")
Steps = list[tuple[float, float]]  # seconds of a step, and the tokens that it gave to a sequence


class Rounds(NamedTuple):
    """The rounds of a start: those that do not count, and behind them those that do."""

    discarded: int
    counted: int


def measure(
    engines: Sequence[Engine],
    cells: Sequence[Cell],
    rounds: Rounds,
    start: int,
    step: Callable[[], object],
    draw: Callable[[Cell, int], list[list[int]]] | None = None,
    fit: Callable[[float], Rounds] | None = None,
) -> Results:
    """Ask engines in turn, in another order from turn to turn and from cell to cell.

    Args:
        engines: running; the first is the baseline.
        cells: what to ask for.
        rounds: of a start.
        start: which start of the engines this is; prompts go on from the last one's, and orders
            are moved by one, because those of a start may be as many as there are.
        step: called before each prompt or batch of an engine.
        draw: gives the prompts of a cell's turn; None for random tokens.
        fit: gives other rounds, by the seconds of the first; there are no more of them.

    Raises:
        SettingError: the engines are not alike, or a batch did not run together.
    """
    check_alike(engines)
    draw = draw or partial(draw_prompts, engines[0].at_start["vocabulary"])
    results: Results = {cell: {engine.name: Samples() for engine in engines} for cell in cells}
    all_rounds, count = sum(rounds), 0
    while count < sum(rounds):
        begin = time.monotonic()
        number = start * all_rounds + count
        for place, cell in enumerate(cells):
            first: dict[str, list[float]] = {engine.name: [] for engine in engines}
            for turn in range(number * cell.turns, (number + 1) * cell.turns):
                warm, prompts = (draw(one, turn) for one in (WARM, cell))
                for engine in order(engines, turn + place + start):
                    step()
                    engine.ask("begin", prompts=warm, max_tokens=WARM_TOKENS)
                    most = cell.max_tokens(engine.contender.drafts)
                    answer = engine.ask("begin", prompts=prompts, max_tokens=most)
                    first[engine.name] += answer["first"]
            slices = _decode(engines, cell, number * len(cell.slices) + place + start)
            if count < rounds.discarded:
                continue
            for name, samples in results[cell].items():
                steps = [*chain(*slices[name])]
                samples.times += [seconds for seconds, _ in steps] or first[name]
                given = fmean([tokens for _, tokens in steps] or [1])
                turns = [median(seconds for seconds, _ in timed) / given for timed in slices[name]]
                samples.turns.append(turns or first[name])
        if not count and fit is not None:
            rounds = fit(time.monotonic() - begin)
        count += 1
    return results


def _decode(engines: Sequence[Engine], cell: Cell, turn: int) -> dict[str, list[Steps]]:
    """Let engines decode what they have begun, slice by slice in turn.

    A slice is short, because what else a machine does changes within a second.

    Returns:
        By engine the timed steps of each slice, those in which the whole batch ran.

    Raises:
        SettingError: the batch did not run together in half of the steps.
    """
    slices: dict[str, list[Steps]] = {engine.name: [] for engine in engines}
    most = 0
    for number, steps in enumerate(cell.slices):
        for engine in order(engines, turn + number):
            answer = engine.ask("decode", most=UNTIMED + steps)
            given = answer["given"][UNTIMED:]
            timed = zip(answer["steps"][UNTIMED:], given, strict=True)
            slices[engine.name].append(
                [(took, fmean(tokens)) for took, tokens in timed if len(tokens) == cell.batch]
            )
            most = max([most, *map(len, given)])
    for engine in engines:
        if engine.contender.drafts:  # it had room for more than was accepted
            engine.ask("drop")
    whole = [turns for turns in zip(*slices.values(), strict=True) if all(turns)]
    if 2 * sum(min(map(len, turns)) for turns in whole) < cell.steps:
        raise SettingError(
            f"{cell.label}: all sequences ran together in fewer than half of the steps ({most} at "
            "most), so there is too little to time; ask for smaller --batches or --contexts, or "
            "give room by --max-num-seqs, --max-num-batched-tokens or VLLM_CPU_KVCACHE_SPACE."
        )
    return {name: [turns[place] for turns in whole] for place, name in enumerate(slices)}


def order(engines: Sequence[One], turn: int) -> list[One]:
    """Every rotation, forwards and backwards: over 2 x engines turns nobody has the better place.

    Each comes first as often as the others, and behind each of two neighbours alike.
    """
    first = turn // 2 % len(engines)
    rotated = [*engines[first:], *engines[:first]]
    return rotated[::-1] if turn % 2 else rotated


def check_alike(engines: Sequence[Engine]) -> None:
    """Refuse to compare engines that differ in more than their residuals, or their drafts."""
    base, *others = engines
    for engine in others:
        for key, value in engine.at_start["alike"].items():
            expected = base.at_start["alike"][key]
            if value != expected and not (engine.contender.drafts and key in BY_DRAFTS):
                raise SettingError(
                    f"{key} is {value} in the engine of {engine.name} and {expected} in that of "
                    f"{base.name}; give flags with which both are alike."
                )


def check_ran(engine: Engine, facts: dict[str, Any]) -> None:
    """Refuse to report an engine that ran something else than it was to run.

    Args:
        engine: the engine.
        facts: what it says of itself after the measurement.

    Raises:
        SettingError: saying what differs.
    """
    wanted, how = engine.contender.algorithm, "compiled" if facts["compiled"] else "eager"
    if wanted == AUTO:
        wanted = facts["algorithm"]
    ran = {
        (name, way)
        for name, counts in facts["executed"].items()
        for way, count in counts.items()
        if count > engine.at_start["executed"][name][way]
    }
    expected = {(wanted, how)} if facts["executed"] else set()  # none with standard residuals
    if facts["plugin_loaded"] != engine.contender.has_plugin or ran != expected:
        found = ", ".join(f"{name} ({way})" for name, way in sorted(ran)) or "no site"
        plugin = "with" if facts["plugin_loaded"] else "without"
        raise SettingError(
            f"the engine of {engine.name} ran {found} {plugin} the plugin; expected "
            f"{f'{wanted} ({how})' if wanted else 'stock vLLM'}: its figures would be another's."
        )
    for key, before in engine.at_start.get("alike", {}).items():  # a peer has none
        if facts["alike"][key] != before:
            raise SettingError(
                f"{key} is {facts['alike'][key]} in the engine of {engine.name} at the end and was "
                f"{before} at its start: its figures would be those of two engines."
            )
