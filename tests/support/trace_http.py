"""Traces over HTTP while other requests run, against the float64 model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from faults import metrics, until, value
from goldens import ASK, differences, expected, http_answer
from serving import Server
from trace_cases import FAR, wanted

from attnres_serve.verify.oracle import Model, load

URL = "/v1/attn_res/trace"
ANSWER = 6  # tokens that are generated and traced


def trace(server: Server, **body: Any) -> dict[str, Any]:
    return server.client.post(URL, json=body).raise_for_status().json()


def check(found: dict[str, Any], model: Model) -> None:
    """All tokens, all sites, as the float64 model has them."""
    weights, rms = wanted(model, [token["id"] for token in found["tokens"]])
    assert len(found["sites"]) == len(weights)
    for site, own, size in zip(found["sites"], weights, rms, strict=True):
        np.testing.assert_allclose(site["weights"], own, atol=FAR)
        np.testing.assert_allclose(site["rms"], size, atol=FAR, rtol=FAR)


@contextmanager
def others(server: Server, prompts: list[list[int]]) -> Iterator[list[list[dict[str, Any]]]]:
    """Completions of the prompts, all the time; yields the answers to each of them."""
    stop, answers = Event(), [[] for _ in prompts]

    def ask(number: int) -> None:
        while not stop.is_set():
            answers[number] += server.complete(prompts[number], **ASK)["choices"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, number) for number in range(len(prompts))]
        try:
            until(lambda: value(metrics(server), "vllm:num_requests_running") > 0, 120)
            yield answers
        finally:
            stop.set()
    for one in asked:
        one.result()


def check_golden_traces(server: Server, golden: Path) -> None:
    """A golden's prompts are traced and served at once: weights and answers are right."""
    model, cases = load(golden), expected(golden)
    with others(server, [case["prompt"] for case in cases]) as answers:
        traces = [trace(server, prompt=case["prompt"], max_tokens=ANSWER) for case in cases]
    for case, found in zip(cases, traces, strict=True):
        assert found["prompt_tokens"] == len(case["prompt"]) < found["total_tokens"]
        check(found, model)
    problems: list[str] = []
    for case, given in zip(cases, answers, strict=True):
        assert given
        for answer in given:
            problems += differences(case, *http_answer(answer, case["prompt"]))
    assert not problems, "\n".join(problems)
