"""Compare answers with what a golden, or the float64 model, expects."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from serving import Server

from attnres_serve.verify.oracle import Model

# A greedy choice closer than this may fall either way: each of two logprobs of -45 may be off by
# ``bound``, and only less likely tokens by more.
SMALL_GAP = 2e-3


def bound(logprob: float) -> float:
    """How far a served logprob may be from the expected one.

    The README promises it.  Two float32 evaluations in different order: 1e-4 for the hidden state,
    2e-5 relative for the log-softmax of a large logit.  A rounding of float32 is 2^-24, so there is
    room for those of 1600 sums that err in one direction, or 300 of one logit.
    """
    return 1e-4 + 2e-5 * abs(logprob)


def expected(golden: Path) -> list[dict[str, Any]]:
    return json.loads((golden / "expected.json").read_text())


def differences(
    case: dict[str, Any],
    prompt_logprobs: list[float] | None,
    output: list[int],
    logprobs: list[float],
) -> Iterator[str]:
    """Every way in which an answer departs from a case of ``expected.json``.

    Args:
        case: the case.
        prompt_logprobs: logprob of each prompt token from the second on, None if not asked for.
        output, logprobs: generated tokens and their logprobs.
    """
    if prompt_logprobs is not None:
        wanted = case["prompt_logprobs"][1:]
        assert len(prompt_logprobs) == len(wanted)
        for position, (found, want) in enumerate(zip(prompt_logprobs, wanted, strict=True), 1):
            if not abs(found - want) <= bound(want):
                yield f"prompt token {position}: {found} instead of {want}"
    assert len(output) == len(logprobs) == len(case["output"])
    rows = zip(
        output, logprobs, case["output"], case["output_logprobs"], case["output_gap"], strict=True
    )
    for position, (token, found, wanted_token, want, gap) in enumerate(rows):
        if gap < SMALL_GAP:
            return
        if token != wanted_token:
            yield f"output token {position}: {token} instead of {wanted_token}"
            return
        if not abs(found - want) <= bound(want):
            yield f"output token {position}: {found} instead of {want}"


def oracle_differences(model: Model, case: dict[str, Any]) -> list[str]:
    """Every way in which a float64 model departs from a case of ``expected.json``."""
    prompt = case["prompt"]
    given = model.logprobs(prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    tokens, logprobs, _ = model.greedy(prompt, len(case["output"]))
    return [*differences(case, given.flatten().tolist(), tokens, logprobs)]


def http_answer(choice: dict[str, Any], prompt: list[int]) -> tuple:
    """Prompt logprobs, tokens and logprobs of a choice of ``/v1/completions``.

    The request asks for ``logprobs=0``, ``return_tokens_as_token_ids`` and, perhaps,
    ``prompt_logprobs=0``.
    """
    given = choice.get("prompt_logprobs")
    prompt_logprobs = None
    if given is not None:
        pairs = zip(given[1:], prompt[1:], strict=True)
        prompt_logprobs = [entry[str(token)]["logprob"] for entry, token in pairs]
    tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    return prompt_logprobs, tokens, choice["logprobs"]["token_logprobs"]


ASK = {
    "logprobs": 0,
    "return_tokens_as_token_ids": True,
    "ignore_eos": True,
}


def check_golden_over_http(server: Server, golden: Path, caches_prefixes: bool = True) -> None:
    """Alone, in a batch, and once more: every answer within the bound.

    The last one comes from the prefix cache, if vLLM has one for the model.
    """
    cases = expected(golden)
    found: list[str] = []
    for case in cases:
        answer = server.complete(case["prompt"], prompt_logprobs=0, **ASK)["choices"][0]
        found += differences(case, *http_answer(answer, case["prompt"]))
    batch = server.complete([case["prompt"] for case in cases], prompt_logprobs=0, **ASK)
    choices = sorted(batch["choices"], key=lambda choice: choice["index"])
    for case, choice in zip(cases, choices, strict=True):
        found += differences(case, *http_answer(choice, case["prompt"]))
    longest = max(cases, key=lambda case: len(case["prompt"]))
    cached = server.complete(longest["prompt"], **ASK)
    if caches_prefixes and cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0:
        cached = server.complete(longest["prompt"], **ASK)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 or not caches_prefixes
    found += differences(longest, *http_answer(cached["choices"][0], longest["prompt"]))
    assert not found, "\n".join(found)


def check_executed(info: dict[str, Any], algorithm: str, compiled: bool) -> None:
    """The counters say that this algorithm ran, no other did, and whether it was compiled."""
    assert info["algorithm"] == algorithm
    assert {name for name, passes in info["executed"].items() if passes} == {algorithm}
    in_graph = info["executed_compiled"][algorithm]
    assert in_graph == (info["executed"][algorithm] if compiled else 0)


def check_job(
    result: dict[str, Any], cases: list[dict[str, Any]], caches_prefixes: bool = True
) -> None:
    """Every answer of a job on a golden within the bound: alone, in a batch and once more.

    The last one comes from the prefix cache, if vLLM has one for the model.
    """
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert result["cached"]["cached"] > 0 or not caches_prefixes
    found: list[str] = []
    for case, answer in [
        *zip(cases, result["alone"], strict=True),
        *zip(cases, result["batch"], strict=True),
        (longest, result["cached"]),
    ]:
        found += differences(case, answer["prompt_logprobs"], answer["tokens"], answer["logprobs"])
    assert not found, "\n".join(found)


Judge = Callable[[tuple[int, ...]], tuple[torch.Tensor, list[float]]]


def judge_of(model) -> Judge:
    """What a float64 model says of tokens: their logprobs, and how far float32 may lie off.

    In random models of small weights a few positions lose all but some digits: rounding the weights
    to float32 alone moves them by 1e-5 to 8e-5, others by 2e-7.  An evaluation in float32, which
    rounds everywhere, is off by about ``EVERYWHERE`` times as much.
    """
    models = all_moved(model)

    def judge(ids: tuple[int, ...]) -> tuple[torch.Tensor, list[float]]:
        logprobs = model.logprobs(ids)
        off = farthest(logprobs, [one.logprobs(ids) for one in models])
        return logprobs, off.amax(-1).tolist()

    return cache(judge)


def check_against(
    judge: Judge, prompt: list[int], answer: dict, where: str, bounds: int = 1
) -> list[str]:
    """Compare an answer with a float64 model: prompt, and the served tokens given themselves.

    A logprob may be off by so many ``bounds``.
    """
    tokens = answer["tokens"]
    logprobs, reach = judge((*prompt, *tokens))
    found = []
    given = answer["prompt_logprobs"]
    for position, token in enumerate(prompt[1:] if given else ()):
        want = float(logprobs[position, token])
        if not abs(given[position] - want) <= bounds * bound(want) + reach[position]:
            found.append(f"{where}: prompt token {position + 1}: {given[position]}, not {want}")
    for step, (token, value) in enumerate(zip(tokens, answer["logprobs"], strict=True)):
        position = len(prompt) - 1 + step
        row = logprobs[position]
        best, want = float(row.max()), float(row[token])
        if not abs(value - want) <= bounds * bound(want) + reach[position]:
            found.append(f"{where}: output token {step}: {value}, not {want}")
        if best - want > SMALL_GAP + 2 * reach[position]:
            found.append(f"{where}: output token {step} is not the greedy choice")
    return found


def check_rows(
    judge: Judge, rows: Sequence[tuple[str, list[int], dict[str, Any]]], bounds: int = 1
) -> None:
    """Compare answers with a float64 model: where each is from, its prompt and itself.

    One whose experts are almost tied at an early token is allowed much from there on, others must
    be judged closely: of 500 prompts 98 in 100 are allowed less than 3e-3 in their middle.
    """
    found = [
        fault
        for where, prompt, answer in rows
        for fault in check_against(judge, prompt, answer, where, bounds)
    ]
    assert not found, "\n".join(found)
    reaches = [judge((*prompt, *answer["tokens"]))[1] for _, prompt, answer in rows]
    assert min(map(median, reaches)) < CLOSELY


def check_answers(model, job: dict[str, Any], result: dict[str, Any], cached: bool = False) -> None:
    """Compare every answer of a job with a float64 model: alone, in a batch, and once more."""
    prompts, way = job["prompts"], f"{job['algorithm']}, {job['options']}"
    rows = [
        (f"{way}, {kind}, {len(prompt)} tokens", prompt, answer)
        for kind in ("alone", "batch")
        for prompt, answer in zip(prompts, result[kind], strict=True)
    ]
    if cached:
        rows.append((f"{way}, cached", max(prompts, key=len), result["cached"]))
    check_rows(judge_of(model), rows)


def check_all_against(
    model, job: dict[str, Any], result: dict[str, Any], caches_prefixes: bool = True
) -> None:
    """The same, the last answer being from the prefix cache, if vLLM has one for the model."""
    assert result["cached"]["cached"] > 0 or not caches_prefixes
    check_answers(model, job, result, cached=True)


def check_alike(model, job: dict[str, Any], found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The answers alone of a job whose queries are zero, and those of an engine without sites.

    One float64 model judges both.  The mean over sources, whose norm has its eps, is up to a bound
    off the sum, so each may be off by one more.
    """
    rows = [
        (where, prompt, answer)
        for where, result in (("zero queries", found), ("no sites", plain))
        for prompt, answer in zip(job["prompts"], result["alone"], strict=True)
    ]
    check_rows(judge_of(model), rows, bounds=2)


# How far off the middle position of a prompt may be that is judged closely.
CLOSELY = 1e-2

# Times as far off as rounded weights alone, where everything is rounded: a number passes through
# about a thousand roundings, of which those of its weights are one, and they add up as its root.
EVERYWHERE = 32

# One draw may happen to move a position by next to nothing.  Of 26 thousand positions of Gemmas
# with adapters one lay at 1.4 times what one draw allows, and none beyond 0.31 of what four do.
DRAWS = 4


def all_moved(model) -> list:
    """Models that are as far off as an evaluation in float32 may be.

    Weights are moved both ways, so that a choice of experts which is as close as that falls both
    ways, and so does a step of an activation.
    """
    return [moved(model, far, draw) for draw in range(DRAWS) for far in (EVERYWHERE, -EVERYWHERE)]


def farthest(own: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far off any of the others is, by element."""
    return (torch.stack([*others]) - own).abs().amax(0)


def moved(model, far: float, number: int):
    """A float64 model whose weights are so many times as far off as float32's are, by a draw."""
    draw = torch.Generator().manual_seed(number)
    weights = {
        name: weight
        * (1 + far * 2**-24 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
        for name, weight in model.weights.items()
    }
    return replace(model, weights=weights)
