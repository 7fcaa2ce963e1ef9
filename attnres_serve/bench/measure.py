"""The measurement of engines in turn, case by case, with the same new prompts for all."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from attnres_serve.bench.process import Engine
from attnres_serve.bench.ratios import Results, Samples
from attnres_serve.bench.workload import UNTIMED, WARM, WARM_TOKENS, Case, draw_prompts
from attnres_serve.errors import SettingError
from attnres_serve.settings import AUTO

PROCEDURE = 6  # changes with the meaning of a figure: do not compare documents with different ones
DISCARDED = 2  # uncounted rounds at the beginning of every start, which are short
# What vLLM may choose differently with drafts, which is a part of their cost.
BY_DRAFTS = ("async_scheduling", "cuda_graphs", "max_num_batched_tokens")
One = TypeVar("One")
Steps = list[tuple[float, float]]  # seconds of a step, and its tokens per sequence


class Rounds(NamedTuple):
    """The numbers of rounds of a start: first the uncounted short ones, then the counted ones."""

    discarded: int
    counted: int


def measure(
    engines: Sequence[Engine],
    cases: Sequence[Case],
    rounds: Rounds,
    start: int,
    step: Callable[[], object],
    draw: Callable[[Case, int], list[list[int]]] | None = None,
    fit: Callable[[float, float], Rounds] | None = None,
) -> Results:
    """Measure engines in turn, in an order that changes with the turn and the case.

    An uncounted round has one turn and one slice of every case, after which engines are warm.

    Args:
        engines: the running engines; the first is the baseline.
        cases: the cases to measure.
        rounds: the rounds of a start.
        start: the number of this start; prompts continue those of the start before, and orders
            are shifted by one, because a start may have as many turns as there are orders.
        step: called before each prompt or batch of an engine.
        draw: draws the prompts of a case's turn; None for random tokens.
        fit: returns other rounds, at most as many counted ones, from the seconds of an uncounted
            round and the estimated seconds of a counted one; called after the uncounted ones.

    Raises:
        SettingError: the engines differ, or a batch did not run together.
    """
    check_alike(engines)
    draw = draw or partial(draw_prompts, engines[0].at_start["vocabulary"])
    results: Results = {case: {engine.name: Samples() for engine in engines} for case in cases}
    all_rounds, count = sum(rounds), 0
    while count < sum(rounds):
        is_counted = count >= rounds.discarded
        short_s = whole_s = 0.0
        number = start * all_rounds + count  # of prompts
        for place, case in enumerate(cases):
            run = case if is_counted else case.shortest
            begin = time.monotonic()
            first: dict[str, list[float]] = {engine.name: [] for engine in engines}
            # By the round within the start: by ``number``, all starts could have one order.
            shift = place + start
            for turn in range(case.turns if is_counted else 1):
                warm, prompts = (draw(one, number * case.turns + turn) for one in (WARM, case))
                for engine in order(engines, count * case.turns + turn + shift):
                    step()
                    engine.ask("begin", prompts=warm, max_tokens=WARM_TOKENS)
                    most = run.max_tokens(engine.spec.drafts)
                    answer = engine.ask("begin", prompts=prompts, max_tokens=most)
                    first[engine.name] += answer["first"]
            begun = time.monotonic()
            slices = _decode(engines, run, count * len(case.slices) + shift, is_counted)
            if not is_counted:
                begin_s, decode_s = begun - begin, time.monotonic() - begun
                short_s += begin_s + decode_s
                whole_s += case.turns * begin_s + len(case.slices) * decode_s
                continue
            for name, samples in results[case].items():
                steps = [*chain(*slices[name])]
                samples.times += [seconds for seconds, _ in steps] or first[name]
                tokens = fmean([count for _, count in steps] or [1])
                taken = [median(seconds for seconds, _ in timed) / tokens for timed in slices[name]]
                samples.turns.append(taken or first[name])
        count += 1
        if count == rounds.discarded and fit is not None:
            rounds = fit(short_s, whole_s)
    return results


def _decode(
    engines: Sequence[Engine], case: Case, turn: int, is_counted: bool
) -> dict[str, list[Steps]]:
    """Let engines decode their begun prompts, slice by slice in turn.

    A slice is short, because the load of a machine changes within a second.

    Returns:
        For each engine the timed steps of each slice in which the whole batch ran.

    Raises:
        SettingError: the batch did not run together in half of the steps that are counted.
    """
    slices: dict[str, list[Steps]] = {engine.name: [] for engine in engines}
    most = 0
    for number, steps in enumerate(case.slices):
        for engine in order(engines, turn + number):
            answer = engine.ask("decode", most=UNTIMED + steps)
            tokens_of_steps = answer["tokens"][UNTIMED:]
            timed = zip(answer["steps"][UNTIMED:], tokens_of_steps, strict=True)
            slices[engine.name].append(
                [(took, fmean(tokens)) for took, tokens in timed if len(tokens) == case.batch]
            )
            most = max([most, *map(len, tokens_of_steps)])
    for engine in engines:
        if engine.spec.drafts:  # max_tokens was for accepting all drafts
            engine.ask("drop")
    whole = [turns for turns in zip(*slices.values(), strict=True) if all(turns)]
    if is_counted and 2 * sum(min(map(len, turns)) for turns in whole) < case.steps:
        raise SettingError(
            f"{case.label}: all sequences ran together in fewer than half of the steps ({most} at "
            "most), so there is too little to time; ask for smaller --batches or --contexts, or "
            "give room by --max-num-seqs, --max-num-batched-tokens or VLLM_CPU_KVCACHE_SPACE."
        )
    return {name: [turns[place] for turns in whole] for place, name in enumerate(slices)}


def order(engines: Sequence[One], turn: int) -> list[One]:
    """Every rotation, forwards and backwards: over 2 x engines turns all have the same positions.

    Each comes first equally often, and equally often after each of its two neighbours.
    """
    first = turn // 2 % len(engines)
    rotated = [*engines[first:], *engines[:first]]
    return rotated[::-1] if turn % 2 else rotated


def check_alike(engines: Sequence[Engine]) -> None:
    """Refuse to compare engines that differ in more than their residuals or drafts."""
    base, *others = engines
    for engine in others:
        for key, value in engine.at_start["alike"].items():
            expected = base.at_start["alike"][key]
            if value != expected and not (engine.spec.drafts and key in BY_DRAFTS):
                raise SettingError(
                    f"{key} is {value} in the engine of {engine.name} and {expected} in that of "
                    f"{base.name}; give flags with which both are alike."
                )


def check_ran(engine: Engine, facts: dict[str, Any]) -> None:
    """Refuse to report an engine that did not run as expected.

    Args:
        engine: the engine.
        facts: its facts after the measurement.

    Raises:
        SettingError: the engine ran something else.
    """
    algorithm, how = engine.spec.algorithm, "compiled" if facts["compiled"] else "eager"
    if algorithm == AUTO:
        algorithm = facts["algorithm"]
    ran = {
        (name, way)
        for name, counts in facts["executed"].items()
        for way, count in counts.items()
        if count > engine.at_start["executed"][name][way]
    }
    expected = {(algorithm, how)} if facts["executed"] else set()  # none with standard residuals
    if facts["plugin_loaded"] != engine.spec.has_plugin or ran != expected:
        ran_sites = ", ".join(f"{name} ({way})" for name, way in sorted(ran)) or "no site"
        plugin = "with" if facts["plugin_loaded"] else "without"
        raise SettingError(
            f"the engine of {engine.name} ran {ran_sites} {plugin} the plugin; expected "
            f"{f'{algorithm} ({how})' if algorithm else 'stock vLLM'}: its figures would be "
            "another's."
        )
    for key, before in engine.at_start.get("alike", {}).items():  # other servers have none
        if facts["alike"][key] != before:
            raise SettingError(
                f"{key} is {facts['alike'][key]} in the engine of {engine.name} at the end and was "
                f"{before} at its start: its figures would be those of two engines."
            )
