"""Statistics of a real server that caches prefixes, rejects drafts and preempts requests."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from faults import metrics, until, value
from serving import Server, running_demo

import attnres_serve
from attnres_serve import cli
from tests.server.test_statistics import URL, check, mean_of_traces

pytestmark = pytest.mark.engine

SHARED = [7, 30, 12, 99, 41, 5] * 12  # more than a block of the cache, which is read again
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "64"),
    *("--block-size", "32", "--num-gpu-blocks-override", "10"),  # for one sequence and a bit
    *("--speculative-config", json.dumps(DRAFTS)),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_demo(tmp_path_factory.mktemp("statistics") / "log", *FLAGS) as found:
        yield found


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    return server.client.post(path, json=body).raise_for_status().json()


def ask(server: Server, number: int) -> list[tuple[list[int], int]]:
    """A request, whole or as a stream; its sequences, with the lengths of their prompts."""
    body = {"max_tokens": 40 + number, "return_token_ids": True, "temperature": 1}
    if number % 3 == 0:
        found = post(server, "/v1/completions", prompt=[*SHARED, 9 + number], n=2, **body)
        prompt = found["choices"][0]["prompt_token_ids"]
        return [([*prompt, *one["token_ids"]], len(prompt)) for one in found["choices"]]
    body |= {"messages": [{"role": "user", "content": "def add(a, b):\n    " * number}]}
    if number % 3 == 1:
        found = post(server, "/v1/chat/completions", **body)
        prompt, answer = found["prompt_token_ids"], found["choices"][0]["token_ids"]
        return [([*prompt, *answer], len(prompt))]
    prompt, answer = [], []
    body |= {"stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                prompt += event.get("prompt_token_ids") or []
                answer += [x for one in event["choices"] for x in one.get("token_ids") or []]
    return [([*prompt, *answer], len(prompt))]


def test_exactly_the_tokens_of_requests_are_counted(server, tmp_path):
    """What serving computes twice, in vain or not at all counts once."""
    ask(server, 3)  # before the start
    assert post(server, f"{URL}/start", cost=1)["sequences"] == 0
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(lambda number: ask(server, number), range(1, 10))
        sequences = [one for several in asked for one in several]
    until(lambda: server.get(URL)["sequences"] >= len(sequences), 120)
    found = post(server, f"{URL}/stop")
    shown = metrics(server)
    drafts = value(shown, "vllm:spec_decode_num_draft_tokens_total")
    assert drafts > value(shown, "vllm:spec_decode_num_accepted_tokens_total") > 0
    assert value(shown, "vllm:num_preemptions_total") > 0
    assert value(shown, "vllm:prefix_cache_hits_total") > 0
    assert found["sequences"] == len(sequences) and not any(found["skipped"].values())
    prefill = sum(prompt for _, prompt in sequences)
    decode = sum(len(ids) - prompt for ids, prompt in sequences)
    assert found["tokens"] == {"prefill": prefill, "decode": decode}
    check(found, mean_of_traces(server.client, sequences))
    in_python = attnres_serve.statistics(server.url)
    assert in_python["tokens"].to_series().to_dict() == found["tokens"]
    figure, numbers, again = (tmp_path / name for name in ("one.png", "numbers.json", "two.png"))
    numbers.write_text(server.client.get(URL).text)
    assert cli.main(["inspect", "--from", server.url, "--out", str(figure)]) == 0
    assert cli.main(["inspect", "--from", str(numbers), "--out", str(again)]) == 0
    assert again.read_bytes() == figure.read_bytes()


def test_replays_keep_to_their_share(server):
    """By the clock, without the last replay, whose wait is not over then."""
    looks = []

    def three_are_counted() -> bool:
        looks.append((time.monotonic(), server.get(URL)))
        return looks[-1][1]["sequences"] >= 3

    post(server, f"{URL}/start", cost=0.05)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.map(lambda number: ask(server, 1 + 3 * number), range(8))
        until(three_are_counted, 120, pause=0.02)
        end = time.monotonic()
        list(asked)
    post(server, f"{URL}/stop")
    begin = max(at for at, found in looks if found["sequences"] == 0)
    last = looks[-1][1]["sequences"]
    seconds = max(found["seconds"] for _, found in looks if found["sequences"] < last)
    # The first replay may have run before this beginning, what it waits comes behind.
    assert 0 < seconds * (1 / 0.05 - 1) <= end - begin
