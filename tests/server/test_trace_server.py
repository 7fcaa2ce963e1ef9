"""``POST /v1/attn_res/trace`` through a server that answers others meanwhile."""

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import cells
import numpy as np
import pytest
import torch
from demo_servers import CHUNK, KEY
from edited_oracle import evaluate, greedy
from faults import find, metrics, until, value
from goldens import ASK, expected
from lens_oracle import lens
from openai import OpenAI
from safetensors import safe_open
from serving import DEMO, GOLDENS, OURS, Server, running, running_demo
from trace_cases import FAR, LOGPROBS, check_lens
from trace_http import ANSWER, URL, check, check_golden_traces, others, trace

import attnres_serve
from attnres_serve import cli
from attnres_serve.verify.oracle import load
from tests.server.test_server import ROOT, at, run

pytestmark = pytest.mark.engine

TEXT = "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self" * 6  # longer than a chunk
LONG = 500  # tokens that a client asks for and does not wait for


@pytest.fixture(scope="module")
def model():
    return load(DEMO)


def test_beside_other_requests(server, model):
    """Text, cached or not, and an answer, which is the one that a completion gives."""
    with others(server, [[3 + number] * (5 + 40 * number) for number in range(3)]):
        found = [trace(server, prompt=TEXT, max_tokens=6) for _ in range(2)]
        answer = server.complete(TEXT, max_tokens=6)["choices"][0]["text"]
    for one in found:
        assert one["prompt_tokens"] > CHUNK
        generated = one["tokens"][one["prompt_tokens"] :]
        assert "".join(token["text"] for token in generated) == answer
        check(one, model)


def test_edits_beside_other_requests(server, model):
    """Weights, logprobs, lens and answer of edited traces; what runs beside them is as ever."""
    ids = [token["id"] for token in trace(server, prompt=TEXT, sites=[])["tokens"]]
    edits = [{"sites": [9, 16], "sources": ["block 1"], "tokens": [*range(4, 90)], "mask": True}]
    asked = {"prompt": ids, "edits": edits, "logprobs": 2, "lens": 1}
    prompts = [[3 + number] * (5 + 40 * number) for number in range(3)]
    with others(server, prompts) as answers:
        found = [trace(server, **asked, max_tokens=number) for number in (0, 3)]
        check(trace(server, prompt=ids), model)
    for prompt, given in zip(prompts, answers, strict=True):
        (text,) = {answer["text"] for answer in given}
        assert text == server.complete(prompt, **ASK)["choices"][0]["text"]
    for one in found:
        every = [token["id"] for token in one["tokens"]]
        assert every[: len(ids)] == ids
        assert every[len(ids) :] == greedy(model, ids, edits, len(every) - len(ids))
        weights, _, logprobs = evaluate(model, every, edits)
        for site, own in zip(one["sites"], weights, strict=True):
            np.testing.assert_allclose(site["weights"], own, atol=FAR)
        read = {(one["site"], one["vector"]): one["predictions"] for one in one["lens"]}
        check_lens(read, lens(model, every, edits), every)
        for name, table in (("edited", logprobs), ("unedited", model.logprobs(every))):
            rows = one["logprobs"][name][:-1]
            own = table[:-1].gather(1, torch.tensor(every[1:])[:, None])[:, 0]
            np.testing.assert_allclose([row["next"] for row in rows], own, atol=LOGPROBS)
    assert len(found[1]["tokens"]) == len(ids) + 3


def numbers(found):
    """All that a trace says of its tokens."""
    for site in found["sites"]:
        yield from np.ravel(site["weights"])
        yield from np.ravel(site["rms"])
        yield from site["entropy"]
    for rows in filter(None, found["logprobs"].values()):
        yield from (row["next"] for row in rows if row["next"] is not None)


def test_traces_at_once(server):
    """They begin alike, are asked for together, and say what each says alone."""
    edits = [{"sites": [3], "sources": ["embedding"], "mask": True}]
    for length in (40, 150):
        shared = [3 + 7 * number % 290 for number in range(length)]
        asked = [
            {"prompt": [*shared, *range(40, 40 + count)], "max_tokens": answer, "logprobs": 1}
            for count, answer in ((0, 0), (20, 0), (1, 4), (0, 4))
        ]
        asked += [asked[1] | {"edits": edits}, asked[2] | {"tokens": {"start": length}}]
        alone = [trace(server, **one) for one in asked]
        with ThreadPoolExecutor(3) as pool, others(server, [shared]) as answers:
            found = [*pool.map(lambda one: trace(server, **one), asked * 2)]
        for own, wanted in zip(found, alone * 2, strict=True):
            assert own["tokens"] == wanted["tokens"]
            assert [*numbers(own)] == pytest.approx([*numbers(wanted)], abs=FAR)
        assert len({answer["text"] for answer in answers[0]}) == 1


def test_chat(server, model):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    found = trace(server, model="demo", messages=messages)
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    asked = client.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    assert found["prompt_tokens"] == asked.usage.prompt_tokens
    check(found, model)


def test_the_command_and_python_give_the_routes_answer(server, monkeypatch, tmp_path):
    asked = {"max_tokens": 2, "logprobs": 3, "lens": 2}
    edit = 'mask sites=final sources="block 1" tokens=2'
    edits = [{"sites": ["final"], "sources": ["block 1"], "tokens": [2], "mask": True}]
    wanted = trace(server, prompt=TEXT, edits=edits, **asked)
    found = attnres_serve.trace(server.url, TEXT, key=KEY, edits=edit, **asked)
    assert found.answer.model_dump(mode="json") == wanted
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out = tmp_path / "trace.json"
    words = ["--url", server.url, "--prompt", TEXT, "--edit", edit, "--max-tokens", "2"]
    assert cli.main(["inspect", *words, "--lens", "2", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == wanted


def test_vectors_of_python_are_patched_in(server, model):
    """Own vectors change nothing; those of another text give what follows in it."""
    ask = partial(attnres_serve.trace, server.url, key=KEY, logprobs=1)
    ids = [token["id"] for token in trace(server, prompt=TEXT, sites=[])["tokens"]]
    plain, other = (ask(own, sites=[9, 16], vectors=True) for own in (ids, ids[::-1]))
    assert plain.vectors[9]["output"].dims == ("token", "hidden")
    assert [*plain.vectors[16]] == ["sources", "mix"]

    def patched(given: attnres_serve.Trace) -> attnres_serve.Trace:
        sources = given.vectors[16]["sources"]
        return ask(
            ids,
            edits=[
                {"sites": ["final"], "sources": [name], "replace": sources.sel(source=name)}
                for name in sources["source"].values
            ],
        )

    own = patched(plain)["top_logprob"].values
    np.testing.assert_array_equal(own, plain["top_logprob"].values)
    found = patched(other)["top_logprob"].values
    np.testing.assert_allclose(found, other["top_logprob"].values, atol=LOGPROBS)
    assert abs(found - plain["top_logprob"].values).max() > 1


def test_a_client_that_goes_away_leaves_nothing(server, model):
    """Its generation is aborted, which is counted, and the next trace is answered.

    An answer may be complete before a client of a busy machine can go, but not every time.
    """

    def count(name: str, **labels: str) -> float:
        return value(metrics(server), name, **labels)

    generated = partial(count, "vllm:generation_tokens_total")
    cancelled = partial(count, "attnres_traces_total", outcome="cancelled")
    ended = partial(count, "attnres_traces_total")
    asked = json.dumps({"prompt": [3, 4, 5], "max_tokens": LONG})
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}

    def is_aborted() -> bool:
        before, were_cancelled, had_ended = generated(), cancelled(), ended()
        with closing(HTTPConnection("127.0.0.1", server.client.base_url.port)) as client:
            client.request("POST", URL, asked, headers)
            until(lambda: generated() > before, 60)
        until(lambda: ended() > had_ended, 60)
        until(lambda: count("vllm:num_requests_running") == 0, 60)
        check(trace(server, prompt=[3, 4, 5]), model)
        return cancelled() == were_cancelled + 1 and generated() - before < LONG

    until(is_aborted, 120)


@pytest.mark.parametrize("path", cells.FILES, ids=lambda path: path.name)
def test_the_cells_of_python(path, server, monkeypatch, tmp_path):
    """A notebook and a page show what is written in them; this server is their engine."""
    ask = attnres_serve.trace

    def from_server(checkpoint, prompt, *, dtype, served_model_name=None, **asked):
        assert (tmp_path / checkpoint).resolve() == DEMO and dtype == "float32"
        found = ask(server.url, prompt, key=KEY, **asked)
        name = {"model": served_model_name or checkpoint}
        renamed = attnres_serve.Trace(found.answer.model_copy(update=name))
        renamed.vectors = found.vectors
        return renamed

    monkeypatch.setattr(attnres_serve, "trace", from_server)
    cells.link_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    cells.check(path)


def ask_at(server, monkeypatch):
    """Let what asks the address of the documentation ask this server."""
    ask = attnres_serve.trace
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(
        attnres_serve, "trace", lambda url, *words, **asked: ask(at(server, url), *words, **asked)
    )


def test_the_cells_of_texts(server, monkeypatch, tmp_path):
    cells.link_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    ask_at(server, monkeypatch)
    cells.check(cells.TEXTS)


def test_the_tutorial(server, monkeypatch, tmp_path):
    """Its commands and cells show what is written, in the order of the page."""
    page = cells.TUTORIAL.read_text()
    start, *commands = [cells.Cell(*both) for both in re.findall(cells.COMMANDS, page, re.S)]
    assert start.code.startswith("make serve") and "--dtype float32" in start.code
    cells.link_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for command in commands:  # one starts a server of its own
        shown = run(["bash", "-ec", command.code.replace("http://127.0.0.1:8000", server.url)])
        if command.shown:
            cells.compare(command, shown)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("tutorial.png", "lines.py", "map.json", "map.losses.jsonl", "edited.png"),
        *("examples", "demo"),
    }
    ask_at(server, monkeypatch)
    cells.check(cells.TUTORIAL)


def test_the_examples_of_the_documentation(server, monkeypatch, tmp_path):
    """The traces of docs/use/inspect.md, word for word but for the address and the key."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "use" / "inspect.md").read_text()
    curls = re.findall(r"```bash\n(curl http://127.0.0.1:8000/v1/attn_res/trace.*?)```", page, re.S)
    key = f"-H 'Authorization: Bearer {KEY}' -H"
    edited, read, plain, _ = (
        run(["bash", "-c", at(server, curl).replace("-H", key, 1)]) for curl in curls
    )
    with safe_open("vectors.safetensors", "np") as file:
        assert {f"site.9.{part}" for part in ("sources", "mix", "output")} < {*file.keys()}
    assert '"kind": "mlp"' in plain and '"index": 4' in plain
    (told,) = re.findall(r"```json\n(\[.*?\])\n```", page, re.S)
    found = {(one["site"], one["vector"]): one for one in json.loads(read)["lens"]}
    for one in json.loads(told):
        own = found[one["site"], one["vector"]]["predictions"]
        for row, other in zip(one["predictions"], own, strict=True):
            assert [token["id"] for token in row["top"]] == [token["id"] for token in other["top"]]
            named = [token["logprob"] for token in other["top"]]
            # Both are float32, there and here, and off by as much.
            far = 2 * LOGPROBS
            assert [token["logprob"] for token in row["top"]] == pytest.approx(named, abs=far)
    both = json.loads(edited)["logprobs"]
    assert both["edited"] and both["edited"] != both["unedited"]


@pytest.mark.soak
def test_a_trace_is_that_of_its_request_whichever_engine_serves_it(tmp_path):
    golden, two = GOLDENS / "fla_transformer_block", ("--data-parallel-size", "2")
    flags = (*two, "--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
    with running(OURS, golden, tmp_path / "log", *flags) as server:
        check_golden_traces(server, golden)
        before = served_by_each(server)
        with ThreadPoolExecutor(8) as pool:
            asked = [
                (case, pool.submit(trace, server, prompt=case["prompt"], max_tokens=ANSWER))
                for case in expected(golden) * 2
            ]
        model = load(golden)
        for case, found in asked:
            check(found.result(), model)
            tokens = [token["id"] for token in found.result()["tokens"]]
            assert tokens == [*case["prompt"], *case["output"][:ANSWER]]
        after = served_by_each(server)
        assert all(now > then for now, then in zip(after, before, strict=True))


def served_by_each(server: Server) -> list[float]:
    """Of two data-parallel engines, how many requests it has answered."""
    text = metrics(server)
    return [value(text, "vllm:request_success_total", engine=engine) for engine in "01"]


@pytest.mark.exhaustive
def test_a_trace_whose_engine_dies_fails(tmp_path):
    """The engine is killed while it is asked, and the server outlives it."""
    with running_demo(tmp_path / "log", VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as server:
        engine = find(server.process.pid, "EngineCore")
        failed = value(metrics(server), "attnres_traces_total", outcome="failed")
        engine.suspend()  # it will not have answered
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(server.client.post, URL, json={"prompt": [3]}),
                pool.submit(server.client.get, "/v1/attn_res"),
            ]
            time.sleep(1)
            assert not any(one.done() for one in asked)
            engine.kill()
            assert [one.result().status_code for one in asked] == [503, 503]
        assert value(metrics(server), "attnres_traces_total", outcome="failed") == failed + 1
        assert server.client.get("/ready").json()["reason"] == "The engine crashed."
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/v1/completions", json={"prompt": [3]}).status_code == 503


def test_the_edits_of_the_model_are_told(server):
    """That of ``demo_servers.every_flag``, in a request's form and in words."""
    (edit,) = server.info["edits"]
    assert edit["scale"] == 1 and not edit["mask"]
    shown = server.client.get("/metrics").raise_for_status().text
    assert 'attnres_edits{edit="scale=1.0"} 1.0' in shown
