"""A trainer's routes on a real server: who may ask, in which order, and what is served after."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from commands import run
from safetensors.torch import load_file
from serving import DEMO, ROOT, Server, running_demo

from attnres_serve import WeightSender
from attnres_serve.compat import tensor_file
from attnres_serve.verify.oracle import load

pytestmark = pytest.mark.engine

KEY = "a key of trainers"
PROMPT = [7, 30, 12, 99, 41, 5] * 30  # more than a block of the cache
NAME = "model.layers.2.mlp.down_proj.weight"
FLAGS = ("--enable-weight-updates", "--dtype", "float32", "--max-model-len", "1024")
BOUND = 1e-4  # of a logprob of float32 against float64, as in README.md, for small ones
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("updates") / "log"
    with running_demo(log, *FLAGS, VLLM_API_KEY=KEY) as found:
        found.client.headers["authorization"] = f"Bearer {KEY}"
        yield found


@pytest.fixture(scope="module")
def first() -> Tensors:
    return {name: one.float() for name, one in load_file(DEMO / "model.safetensors").items()}


@pytest.fixture(scope="module")
def second(first: Tensors) -> Tensors:
    """The demo with other rows in every tensor of its layers."""
    return {name: one.flip(0) if "layers." in name else one for name, one in first.items()}


def answer(server: Server, length: int = 6) -> tuple[list[str], list[float]]:
    found = server.complete(PROMPT, logprobs=0, max_tokens=length, ignore_eos=True)
    logprobs = found["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def refused(server: Server, status: int, route: str, **body: object) -> str:
    found = server.client.post(f"/{route}", json=body)
    assert found.status_code == status, found.text
    message: str = found.json()["error"]["message"]
    assert "\n" not in message
    return message


def test_who_may_ask(server: Server) -> None:
    """A key opens the trainer's routes, and none for development is there."""
    for route in ("pause", "start_weight_update", "update_weights", "finish_weight_update"):
        assert httpx.post(f"{server.url}/{route}", json={}).status_code == 401
    development = ("collective_rpc", "sleep", "reset_prefix_cache", "server_info")
    for route in (*development, "weight_checker", "abort_requests"):
        assert server.client.post(f"/{route}", json={}).status_code == 404


def test_an_update_and_back(server: Server, first: Tensors, second: Tensors) -> None:
    """Answers are the new weights', though the prompt is in the cache, and then the old ones'."""
    sender, before = WeightSender(server.url, KEY), answer(server)
    assert server.info["weights"] == {"version": "default", "changed": None}
    sender.send(second.items(), version="two")
    tokens, logprobs = answer(server)
    model = load(DEMO)
    model.weights = {name: one.double() for name, one in second.items()}
    _, wanted, _ = model.greedy(PROMPT, 6)
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(wanted), rtol=2e-5, atol=BOUND)
    assert (tokens, logprobs) != before
    told = server.info["weights"]
    assert told["version"] == "two" and told["changed"]
    scraped = server.client.get("/metrics").text
    assert 'attnres_weights_changed_timestamp_seconds{version="two"}' in scraped
    sender.send(first.items(), version="one")
    assert answer(server) == before


def test_the_order_of_calls(server: Server) -> None:
    for route in ("update_weights", "finish_weight_update"):
        body = {"update_info": {"path": "x"}} if route == "update_weights" else {}
        assert "call start_weight_update first" in refused(server, 409, route, **body)
    server.client.post("/start_weight_update").raise_for_status()
    server.client.post("/start_weight_update").raise_for_status()  # discards the first one
    assert "lacks" in refused(server, 400, "finish_weight_update")
    assert "call start_weight_update first" in refused(server, 409, "finish_weight_update")


def test_a_bad_tensor_is_named_and_changes_nothing(
    server: Server, first: Tensors, second: Tensors
) -> None:
    sender, before = WeightSender(server.url, KEY), answer(server)
    wrong = second | {NAME: torch.full_like(second[NAME], torch.nan)}
    for sent in (wrong, second | {NAME: second[NAME][:-1]}, second | {"x": second[NAME]}):
        with pytest.raises(RuntimeError, match=f"{NAME}|tensor x"):
            sender.send(sent.items())
        assert answer(server) == before
    server.client.post("/start_weight_update").raise_for_status()
    said = refused(server, 400, "update_weights", update_info={"path": "/nowhere"})
    assert "cannot be read as tensors" in said
    assert answer(server) == before


def test_pieces_beside_requests(server: Server, second: Tensors, first: Tensors) -> None:
    """Old weights are served until an update is finished, which waits for no request that runs."""
    before, client = answer(server), server.client
    client.post("/start_weight_update").raise_for_status()
    pairs = [*second.items()]
    for piece in (pairs[1::2], pairs[::2]):
        with tensor_file.file_of(piece) as path:
            body = {"update_info": {"path": path}}
            client.post("/update_weights", json=body).raise_for_status()
        assert answer(server) == before
    slow = threading.Thread(target=answer, args=(server,), kwargs={"length": 600})
    slow.start()
    end = time.monotonic() + 30
    while not re.search(r"num_requests_running\{.*\} 1", client.get("/metrics").text):
        assert time.monotonic() < end, "the request does not run"
    said = refused(server, 409, "finish_weight_update")
    slow.join()
    assert "while requests run" in said
    assert answer(server) == before
    client.post("/finish_weight_update").raise_for_status()
    assert answer(server) != before
    WeightSender(server.url, KEY).send(first.items())
    assert answer(server) == before


SHORT = PROMPT[:6]  # which leaves room for a long answer


def logprobs_of(weights: Tensors, sequence: list[int]) -> torch.Tensor:
    """Of every token behind the short prompt, by float64 models."""
    model = load(DEMO)
    model.weights = {name: one.double() for name, one in weights.items()}
    rows = model.logprobs(sequence)[len(SHORT) - 1 : -1]
    return rows.gather(1, torch.tensor(sequence[len(SHORT) :])[:, None])[:, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_spans_an_update(server: Server, first: Tensors, stream: bool) -> None:
    """Its first tokens are the old weights', the rest the new ones', and it names both."""
    sender, events = WeightSender(server.url, KEY), []
    # Smaller layers differ in every logprob, and roundings do not grow over 600 tokens.
    second = {name: 0.9 * one if "layers." in name else one for name, one in first.items()}
    sender.send(first.items(), version="one")
    asked = {"prompt": SHORT, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    asked |= {"stream": stream, "logprobs": 0, "return_token_ids": True}

    def ask() -> None:
        with server.client.stream("POST", "/v1/completions", json=asked) as found:
            lines = [line.removeprefix("data: ") for line in found.iter_lines()]
        events.extend(json.loads(line) for line in lines if line.startswith("{"))

    slow = threading.Thread(target=ask)
    slow.start()
    while not re.search(r"num_requests_running\S* 1\.0", server.client.get("/metrics").text):
        time.sleep(0.01)
    sender.post("pause?mode=keep")  # now, and not when the tensors are written
    sender.send(second.items(), version="two", running="keep")
    slow.join()
    assert [one["weight_versions"] for one in events if "weight_versions" in one] == [
        ["one", "two"]
    ]
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    logprobs = [x for choice in choices for x in choice["logprobs"]["token_logprobs"]]
    old, new = (logprobs_of(weights, [*SHORT, *tokens]) for weights in (first, second))
    close = [
        torch.isclose(torch.tensor(logprobs).double(), own, rtol=2e-5, atol=BOUND).tolist()
        for own in (old, new)
    ]
    at = close[0].index(False)
    assert at and all(close[1][at:]) and not all(close[1][:at])
    found = server.complete(PROMPT, logprobs=0, max_tokens=6, ignore_eos=True)
    assert found["weight_versions"] == ["two"]
    with server.client.stream("POST", "/v1/attn_res/trace", json={"prompt": PROMPT}) as traced:
        assert json.loads(traced.read())["weights"] == "two"
    sender.send(first.items(), version="one", running="abort")


@pytest.mark.exhaustive
def test_the_example_learns(server: Server, tmp_path: Path) -> None:
    """Reward rises, and at every step the trainer's logprobs are the server's."""
    words = (sys.executable, ROOT / "examples" / "rl.py", "--url", server.url)
    env = {"OPENAI_API_KEY": KEY, "PATH": "", "HOME": str(tmp_path)}
    found = json.loads(run(*words, env=env, timeout=900).stdout.splitlines()[-1])
    half = len(found["rewards"]) // 2
    assert sum(found["rewards"][half:]) > sum(found["rewards"][:half])
    assert max(found["differences"]) < 2 * BOUND
