"""Edits that change while a server serves: what is computed under which, and what is refused."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import linear_layers, write_merged
from faults import until
from safetensors.torch import load_file
from serving import DEMO, Server, running_demo

from attnres_serve import WeightSender
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit
from attnres_serve.verify import oracle
from attnres_serve.verify.command import edits_by_site
from tests.server.test_statistics import URL, check, mean_of_traces

pytestmark = pytest.mark.engine

KEY = "a key of researchers"
PATH = "/v1/attn_res/edits"
PROMPT = [7, 30, 12, 99, 41, 5] * 30  # more than a block of the cache
FLAGS = ("--enable-attnres-edits", "--dtype", "float32", "--max-model-len", "1024")
BOUND = 1e-4  # of a logprob of float32, as in README.md
MASKED: list[dict[str, Any]] = [{"mask": True, "sources": ["block 1"]}]
EVEN: list[dict[str, Any]] = [{"mean": True, "sites": ["mlp"]}, {"scale": 0.5, "sites": ["final"]}]
Answer = tuple[list[str], list[float]]


def running(log: Path, *flags: str) -> Any:
    return running_demo(log, *FLAGS, *flags, VLLM_API_KEY=KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("edits") / "log", "--enable-weight-updates") as found:
        found.client.headers["authorization"] = f"Bearer {KEY}"
        yield found


@pytest.fixture(autouse=True)
def none_before(server: Server) -> None:
    put(server, [])


def put(server: Server, edits: list[dict[str, Any]]) -> str:
    found = server.client.put(PATH, json={"edits": edits}).raise_for_status().json()
    assert found["edits"] == edits and found == server.get(PATH)
    version: str = found["version"]
    return version


def ask(server: Server, prompt: list[int] = PROMPT, length: int = 6) -> tuple[Answer, list[str]]:
    found = server.complete(prompt, logprobs=0, max_tokens=length, ignore_eos=True)
    logprobs = found["choices"][0]["logprobs"]
    return (logprobs["tokens"], logprobs["token_logprobs"]), found["weight_versions"]


def first_logprob(server: Server, edits: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trace says of the token behind the prompt under edits."""
    body = {"prompt": PROMPT, "tokens": [len(PROMPT) - 1], "logprobs": 1, "edits": edits}
    found = server.client.post("/v1/attn_res/trace", json=body).raise_for_status().json()
    kind = "edited" if edits else "unedited"
    return {"weights": found["weights"], **found["logprobs"][kind][0]["top"][0]}


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.client.post(path, json=body).raise_for_status().json()
    return found


def counted(server: Server, sequences: int) -> dict[str, Any]:
    """The statistics of so many sequences, when they are there."""
    until(lambda: server.get(URL)["sequences"] == sequences, 120)
    found: dict[str, Any] = server.get(URL)
    return found


def check_statistics(server: Server, restarts: int) -> None:
    """Those of two answers from now on are the means of their traces."""
    sequences = []
    for prompt in (PROMPT, PROMPT[:7]):
        found = server.complete(prompt, max_tokens=5, ignore_eos=True, return_token_ids=True)
        sequences.append(([*prompt, *found["choices"][0]["token_ids"]], len(prompt)))
    found = counted(server, len(sequences))
    assert found["restarts"] == restarts and found["weights"] == server.get(PATH)["version"]
    assert found["tokens"] == {"prefill": len(PROMPT) + 7, "decode": 2 * 5}
    check(found, mean_of_traces(server.client, sequences))


def seconds(call: Any, *given: Any) -> float:
    begin = time.monotonic()
    call(*given)
    return time.monotonic() - begin


@pytest.mark.parametrize("edits", [MASKED, EVEN], ids=["masked", "even"])
def test_a_change_and_back(server: Server, edits: list[dict[str, Any]]) -> None:
    """With the prompt in the cache, answers are the trace's `edited` ones, and then the old."""
    before, version = ask(server)
    wanted = first_logprob(server, edits)
    assert ask(server) == (before, version)  # the prefix is warm
    now = put(server, edits)
    assert [now] != version
    found, stated = ask(server)
    assert found[1][0] == pytest.approx(wanted["logprob"], abs=BOUND, rel=2e-5)
    assert found != before and stated == [now]
    assert server.info["edits"][0].items() >= edits[0].items()
    assert server.info["weights"]["version"] == now
    scraped = server.client.get("/metrics").text
    assert f'version="{now}"' in scraped and scraped.count("attnres_edits{") == len(edits)
    served = first_logprob(server, [])
    assert served["weights"] == now
    assert served["logprob"] == pytest.approx(wanted["logprob"], abs=BOUND, rel=2e-5)
    last = put(server, [])
    assert last not in (now, *version)
    assert ask(server) == (before, [last])
    assert "attnres_edits{" not in server.client.get("/metrics").text


def test_a_change_costs_less_than_an_answer(server: Server) -> None:
    """Nothing is compiled or loaded for it; an answer of 60 tokens takes half a second here."""
    answer = min(seconds(ask, server, [3], 60) for _ in range(3))
    change = min(seconds(put, server, edits) for edits in (MASKED, EVEN, MASKED, []))
    print(f"a change takes {change * 1000:.1f} ms, an answer of 60 tokens {answer * 1000:.1f} ms")
    assert change < answer


def test_changes_under_load(server: Server) -> None:
    """Of 16 clients, every response is one version's own, and names it; beam search, too."""
    prompts = [[3 + at, *PROMPT[:70]] for at in range(16)]
    own: dict[str, list[Answer]] = {}  # by edits
    for edits in ([], MASKED, EVEN):
        put(server, edits)
        own[json.dumps(edits)] = [ask(server, prompt, 12)[0] for prompt in prompts]
    versions = {put(server, []): json.dumps([])}
    done = threading.Event()

    def client(at: int) -> list[tuple[Answer, list[str]]]:
        found = []
        while not done.is_set():
            found.append(ask(server, prompts[at], 12))
            body = {"prompt": prompts[at], "max_tokens": 4, "temperature": 0, "n": 2}
            both = server.client.post("/v1/completions", json=body | {"use_beam_search": True})
            assert len(both.raise_for_status().json()["weight_versions"]) == 1
        return found

    with ThreadPoolExecutor(16) as clients:
        running = [clients.submit(client, at) for at in range(16)]
        try:
            for edits in (MASKED, EVEN, [], MASKED):
                time.sleep(0.5)
                versions[put(server, edits)] = json.dumps(edits)
            time.sleep(0.5)
        finally:
            done.set()
    seen = set()
    for at, one in enumerate(running):
        for (tokens, logprobs), stated in one.result():
            (version,) = stated
            wanted = own[versions[version]][at]
            assert tokens == wanted[0]
            assert logprobs == pytest.approx(wanted[1], abs=BOUND, rel=2e-5)
            seen.add(version)
    assert len(seen) > 2


def test_what_is_refused(server: Server) -> None:
    put(server, MASKED)
    before, served = ask(server), server.get(PATH)
    only = {"sources": ["block 1"], "sites": ["final"]}
    for edits, says in (
        ([{"mask": True, "sources": ["block 99"]}], "block 99"),
        ([{"mask": True, "sites": [999]}], "999"),
        ([{"mask": True, "tokens": [1], "sources": ["block 1"]}], "tokens"),
        ([{"scale": 2, **only}], "scales 1 of the"),
        ([{"replace": "AAAA", "sources": ["block 1"]}], "replace"),
        ([{"mean": True}] * 65, "edits"),
        ("none", "edits"),
    ):
        found = server.client.put(PATH, json={"edits": edits})
        assert found.status_code == 400, found.text
        message = found.json()["error"]["message"]
        assert says in message and "\n" not in message
    assert server.client.put(PATH, json={"edits": [], "wait": -1}).status_code == 400
    assert httpx.put(f"{server.url}{PATH}", json={"edits": []}).status_code == 401
    assert httpx.get(f"{server.url}{PATH}").status_code == 401
    assert (ask(server), server.get(PATH)) == (before, served)


def test_requests_that_take_too_long(server: Server) -> None:
    """A change that does not wait for them is given up; then the next request has its turn."""
    body = {"prompt": [3], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        found = server.client.put(PATH, json={"edits": MASKED, "wait": 0})
        assert found.status_code == 409 and "`wait`" in found.json()["error"]["message"]
    assert server.get(PATH)["edits"] == []
    ask(server)


def test_weights_that_come_keep_the_edits(server: Server) -> None:
    put(server, MASKED)
    post(server, f"{URL}/start", cost=1)
    before, sender = ask(server), WeightSender(server.url, KEY)
    first = {name: one.float() for name, one in load_file(DEMO / "model.safetensors").items()}
    other = {name: one.flip(0) if "layers." in name else one for name, one in first.items()}
    mark = server.get(PATH)["version"].removeprefix("default")
    counted(server, 1)
    sender.send(other.items(), version="two")
    assert server.get(PATH) == {"edits": MASKED, "version": f"two{mark}"}
    counted(server, 0)
    check_statistics(server, restarts=1)
    post(server, f"{URL}/stop")
    found, stated = ask(server)
    assert stated == [f"two{mark}"] and found != before[0]
    put(server, [])
    wanted = first_logprob(server, MASKED)["logprob"]
    assert found[1][0] == pytest.approx(wanted, abs=BOUND, rel=2e-5)
    sender.send(first.items(), version="default")
    put(server, MASKED)
    assert ask(server)[0] == before[0]


def test_two_workers_change_together(tmp_path: Path, server: Server) -> None:
    """And no prefix is from before; statistics count what is served under the last ones alone."""
    with running(tmp_path / "log", "--tensor-parallel-size", "2") as two:
        two.client.headers["authorization"] = f"Bearer {KEY}"
        post(two, f"{URL}/start", cost=1)
        for edits in ([], MASKED, EVEN):
            put(server, edits)
            put(two, edits)
            (_, wanted), _ = ask(server)
            for _ in range(2):  # the second time the prefix is in the cache
                assert ask(two)[0][1] == pytest.approx(wanted, abs=BOUND, rel=2e-5)
            counted(two, 2)
        put(two, MASKED)
        counted(two, 0)
        check_statistics(two, restarts=4)


def test_an_adapter_is_served_under_the_edits(tmp_path: Path) -> None:
    """It answers as the weights that it is merged into, under the same edits."""
    layers = linear_layers(load_file(DEMO / "model.safetensors"))
    merged = write_merged(tmp_path / "adapter", DEMO, layers)
    model, parsed = oracle.load(merged), check_folder(merged).translated("merged")
    flags = ("--enable-lora", "--max-lora-rank=8", f"--lora-modules=adapter={tmp_path / 'adapter'}")
    with running(tmp_path / "log", *flags) as found:
        found.client.headers["authorization"] = f"Bearer {KEY}"
        for edits in (MASKED, EVEN, []):
            put(found, edits)
            words = [edit_text.write(Edit.model_validate(edit)) for edit in edits]
            spec = replace(model.spec, edits=edits_by_site(words, parsed))
            wanted = float(model.with_spec(spec).logprobs(PROMPT)[-1].max())
            for _ in range(2):  # the second time the prefix is in the cache
                answer = found.complete(PROMPT, model="adapter", logprobs=0, max_tokens=1)
                (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
                assert logprob == pytest.approx(wanted, abs=BOUND, rel=2e-5)
