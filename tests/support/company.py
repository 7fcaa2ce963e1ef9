"""Requests that must not feel each other: alone, beside others, after others, and from the cache.

A server is asked for the same in all these ways; its own answers are compared, those without
company first.
"""

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from faults import metrics, value
from serving import Server

FAR = 1e-4  # two float32 evaluations in batches of other sizes
Asked = dict[str, Any]
ANSWER = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
LONG: Asked = {"prompt": "class A:\n", "max_tokens": 50, "temperature": 0.8, "ignore_eos": True}
SEEDED: Asked = {"prompt": "def main(", "max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
SEEDED |= {"seed": 42, "return_token_ids": True}
BESIDE_SEEDS: dict[str, list[Asked]] = {
    "unseeded": [LONG] * 2,
    "top_k": [LONG | {"top_k": 5}] * 2,
    "seeded": [LONG | {"seed": 7}] * 2,
    "seeded and unseeded": [LONG, LONG | {"seed": 7}],
    "greedy": [LONG | {"temperature": 0}] * 2,
    "penalties, logprobs": [LONG | {"frequency_penalty": 0.5}, LONG | {"logprobs": 3}],
    "its twin": [SEEDED | {"max_tokens": 50}] * 2,
}


def ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, 300) for _ in range(count)]


def at_once(server: Server, asked: Iterable[Asked], others: Sequence[Asked] = ()) -> list[Any]:
    """The only choice of every request, at most four at a time.

    Three of the ``others`` run at a time beside them; their answers do not matter.
    """
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(3) as beside:
        waiting = [beside.submit(server.client.post, "/v1/completions", json=o) for o in others]
        found = [*pool.map(lambda one: server.complete(**one)["choices"][0], asked)]
        for one in waiting:
            one.result()
    return found


def check_seeds(server: Server) -> None:
    (alone,) = at_once(server, [SEEDED])
    for name, others in BESIDE_SEEDS.items():
        (found,) = at_once(server, [SEEDED], others)
        assert found["token_ids"] == alone["token_ids"], name


def check_prompt_logprobs(server: Server) -> None:
    """Of prompts that share a beginning, whatever of them is in the cache."""
    source = random.Random(5)
    shared = ids(source, 170)
    lengths = ((170, 0), (170, 12), (129, 1), (128, 0), (64, 90), (40, 9))
    prompts = [shared[:n] + ids(source, m) for n, m in lengths]
    asked = [{"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0} for prompt in prompts]
    wanted = [
        said(server.complete(**one, cache_salt=f"cold {number}")["choices"][0], one["prompt"])
        for number, one in enumerate(asked)
    ]
    for prompt in prompts:
        server.complete(prompt, max_tokens=5)  # fills the cache
    echoed = [{"prompt": p, "max_tokens": 2, "echo": True, "logprobs": 0} for p in prompts]
    plain = [{"prompt": prompt, "max_tokens": 20} for prompt in prompts[::2]]
    found = at_once(server, asked) + at_once(server, echoed) + at_once(server, asked, plain)
    for choice, prompt, values in zip(found, prompts * 3, wanted * 3, strict=True):
        assert said(choice, prompt) == pytest.approx(values, abs=FAR)


def said(choice: dict[str, Any], prompt: list[int]) -> list[float]:
    """The logprobs of a prompt's tokens but the first, of a request for them or of an echo."""
    rows = choice["prompt_logprobs"]
    if rows is None:
        return choice["logprobs"]["token_logprobs"][1 : len(prompt)]
    return [row[str(token)]["logprob"] for row, token in zip(rows[1:], prompt[1:], strict=True)]


def check_shared_prefixes(server: Server) -> None:
    """Answers to prompts that begin alike, with less than a block of 128 tokens or with one."""
    source = random.Random(11)
    for length in (64, 128, 158):
        shared, before = ids(source, length), hits(server)
        prompts = [shared + ids(source, count) for count in (1, 70, 80)] + [shared]
        asked = [{"prompt": prompt, "max_tokens": 10} | ANSWER for prompt in prompts]
        alone = [
            server.complete(**one, cache_salt=f"{length} {number}")["choices"][0]
            for number, one in enumerate(asked)
        ]
        for _ in range(2):
            compare(alone, [server.complete(**one)["choices"][0] for one in asked])
            compare(alone, at_once(server, asked))
    assert hits(server) > before, "the longest prefix was not cached"


def check_bad_company(server: Server) -> None:
    """Beside and after requests whose logits overflow or are masked but for one or none."""
    source = random.Random(2)
    more = ({}, {}, {"temperature": 0.8, "seed": 3}, {"frequency_penalty": 0.5})
    good = [
        {"prompt": ids(source, count), "max_tokens": 20} | ANSWER | own
        for count, own in zip((5, 60, 130, 20), more, strict=True)
    ]
    bad = [
        {"prompt": ids(source, count), "max_tokens": 20, "temperature": 0, "ignore_eos": True} | own
        for count, own in (
            (140, {"repetition_penalty": 1e-38}),
            (9, {"repetition_penalty": 1e-38, "temperature": 1.0}),
            (30, {"allowed_token_ids": [40]}),
            (70, {"allowed_token_ids": [2], "min_tokens": 20}),
            (50, {"temperature": 1e-30}),
        )
    ]
    alone = [server.complete(**one)["choices"][0] for one in good]
    for _ in range(2):
        compare(alone, at_once(server, good, bad))
    compare(alone, at_once(server, good))


def compare(alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """The same tokens, and logprobs that are as far apart as rounding takes them."""
    for wanted, own in zip(alone, found, strict=True):
        assert own["token_ids"] == wanted["token_ids"]
        values = wanted["logprobs"]["token_logprobs"]
        assert own["logprobs"]["token_logprobs"] == pytest.approx(values, abs=FAR)


def hits(server: Server) -> float:
    """Tokens that were found in the prefix cache so far."""
    return value(metrics(server), "vllm:prefix_cache_hits_total")


CHECKS = (check_seeds, check_prompt_logprobs, check_shared_prefixes, check_bad_company)
WITH_DRAFTS = (check_seeds, check_prompt_logprobs, check_shared_prefixes)
