"""``POST /v1/attn_res/trace`` with workers in this process in the place of an engine."""

import asyncio
import json
import re
from base64 import b64encode
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edited_oracle import evaluate, greedy
from fastapi import FastAPI
from jobs import fresh_prompts
from lens_oracle import lens
from safetensors.torch import load
from serving import GOLDENS
from starlette.testclient import TestClient
from transformers import LlamaConfig

pytest.importorskip("vllm")

from in_process import world
from trace_cases import FAR, check_lens, check_vectors, wanted, worker_of
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.protocol import TokenizeResponse
from vllm.v1.engine.exceptions import EngineDeadError

from attnres_serve.compat import engine_config, requests
from attnres_serve.depth import resolved_edits
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.server import metrics, passes
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.endpoints import EndpointPlugin
from attnres_serve.server.routes import trace
from attnres_serve.server.traces import replays
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing import readings
from attnres_serve.verify import oracle
from attnres_serve.worker import WorkerExtension

BLOCK = GOLDENS / "fla_transformer_block"
CUMULATIVE = GOLDENS / "qwen3_attnres_cumulative_block"  # no final mix
URL = "/v1/attn_res/trace"
ANSWER = [7, 8, 9]
PARTS = ("sources", "mix", "output")
TEXT = {"hello": [3, 4, 5, 6]}
NOTHING = {"predicted": None, "lens": None, "vectors": {}}  # that a worker was asked to predict


class Client:
    """An engine's client: two stages of one worker each, both with the whole model."""

    def __init__(self, folder) -> None:
        worker = worker_of(folder, "two_phase", "cpp", 16)
        self.workers = [worker, worker]
        self.vllm_config = worker.vllm_config
        self.vllm_config.parallel_config.worker_extension_cls = engine_config.WORKER_EXTENSION
        self.asleep = self.errored = False
        self.ended_by = "length"
        self.calls: list[str] = []
        self.generated = 0
        self.names: list[str] = []
        self.end: int | None = None
        self.input_processor = SimpleNamespace(assign_request_id=None)
        self.renderer = SimpleNamespace(
            tokenizer=None, _detokenize_prompt_async=None, validate_token_ids=None
        )

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        self.calls.append(method)
        await asyncio.sleep(0)
        found = [getattr(WorkerExtension, method)(worker, *args) for worker in self.workers]
        if method == "attn_res_trace":  # a stage has its own sites only
            for stage, worker in enumerate(found):
                worker["sites"] = [site for site in worker["sites"] if (site[0] > 6) == stage]
                worker["vectors"] = {
                    name: part
                    for name, part in worker["vectors"].items()
                    if (int(name.split(".")[1]) > 6) == stage
                }
        return found

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def generate(self, prompt, params, name: str):
        assert params.temperature == 0
        self.generated += 1
        self.names.append(name)
        for end in range(1, params.max_tokens + 1):
            reason = self.ended_by if end == params.max_tokens else None
            made = SimpleNamespace(index=0, token_ids=ANSWER[:end], finish_reason=reason)
            finished = end == params.max_tokens
            yield SimpleNamespace(outputs=[made], prompt_token_ids=[0], finished=finished)

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def get_tokenizer(self):
        return SimpleNamespace(
            encode=lambda text, **_: [0],
            decode=lambda ids: "".join(f"<{token}>" for token in ids),
            eos_token_id=self.end,
        )


class Tokenization:
    async def create_tokenize(self, asked, request) -> TokenizeResponse:
        text = asked.messages[0]["content"] if hasattr(asked, "messages") else asked.prompt
        return TokenizeResponse(tokens=TEXT[text], count=4, max_model_len=256)


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(BLOCK):
        yield


def app_of(client: Client) -> TestClient:
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.engine_client = client
    app.state.serving_tokenization = Tokenization()
    models = [SimpleNamespace(name="demo")]
    app.state.openai_serving_models = SimpleNamespace(
        base_model_paths=models, lora_requests={"tuned": None}
    )
    client.vllm_config.model_config.skip_tokenizer_init = False
    init_exception_handler(app)
    plugin = EndpointPlugin()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(client, app.state, app.state.args))
    client.calls.clear()
    client.generated = 0  # without the warm-up
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_of_several_servers_asks_for_passes(client, rank, monkeypatch):
    monkeypatch.setattr(client.vllm_config.parallel_config, "_api_process_rank", rank)
    state = app_of(client).app.state
    assert hasattr(state, "attn_res_counting") == (rank == 0)
    counted: list[dict] = []
    monkeypatch.setattr(metrics, "count_passes", counted.append)
    assert asyncio.run(passes.executed(client))  # as for each server's GET /v1/attn_res
    assert len(counted) == (rank == 0)


@pytest.fixture
def client() -> Client:
    return Client(BLOCK)


@pytest.fixture
def app(client: Client) -> TestClient:
    return app_of(client)


def refused(app: TestClient, status: int, **body: Any) -> str:
    """The one sentence of an error of OpenAI's shape."""
    answer = app.post(URL, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and error["type"]
    message = error["message"]
    assert message.endswith(".") and "\n" not in message and message.count(". ") == 0
    return message


@pytest.mark.parametrize("folder", [BLOCK, CUMULATIVE], ids=lambda folder: folder.name)
def test_the_answer(folder):
    """Every field, against the float64 model; sites of both stages, in order."""
    (ids,) = fresh_prompts((21,))
    model = oracle.load(folder)
    weights, rms = wanted(model, ids)
    found = app_of(Client(folder)).post(URL, json={"prompt": ids}).raise_for_status().json()
    assert found["model"] == "demo"
    assert found["prompt_tokens"] == found["total_tokens"] == 21
    assert found["tokens"] == [
        {"position": position, "id": token, "text": f"<{token}>"}
        for position, token in enumerate(ids)
    ]
    kinds = [*model.spec.layout, (None, "final")]
    assert len(found["sites"]) == len(weights) == model.spec.final + model.spec.final_mix
    for index, site in enumerate(found["sites"]):
        assert site["index"] == index
        assert (site["layer"], site["kind"]) == kinds[index]
        count = weights[index].shape[1]
        names = ["embedding", *(f"block {number}" for number in range(1, count))]
        reads_partial = model.spec.cumulative or index not in model.spec.starts
        if reads_partial:
            names[-1] = "partial"
        assert site["sources"] == names
        np.testing.assert_allclose(site["weights"], weights[index], atol=FAR)
        np.testing.assert_allclose(site["rms"], rms[index], rtol=FAR)
        np.testing.assert_allclose(np.sum(site["weights"], -1), 1, atol=1e-4)  # six digits
        own = weights[index].numpy()
        np.testing.assert_allclose(site["entropy"], -(own * np.log(own)).sum(-1), atol=FAR)


def test_some_sites_and_tokens(app, client):
    ids = fresh_prompts((30,))[0]
    whole = app.post(URL, json={"prompt": ids}).json()
    part = app.post(URL, json={"prompt": ids, "sites": [7, 2, 7], "tokens": [9, 0]}).json()
    assert [site["index"] for site in part["sites"]] == [2, 7]
    assert [token["position"] for token in part["tokens"]] == [0, 9]
    for site in part["sites"]:
        for key in ("weights", "rms", "entropy"):
            everything = np.array(whole["sites"][site["index"]][key])
            np.testing.assert_allclose(site[key], everything[[0, 9]], rtol=10 * FAR, atol=FAR)
    asked = {"prompt": ids, "sites": [0], "tokens": {"start": 28}}
    assert [token["id"] for token in app.post(URL, json=asked).json()["tokens"]] == ids[28:]
    asked["tokens"] = {"end": 2}
    assert [token["id"] for token in app.post(URL, json=asked).json()["tokens"]] == ids[:2]
    assert client.generated == 0


def test_generated_tokens_are_traced_as_well(app):
    """Those that were not reached are left out, and so is what was not asked for."""
    ids = fresh_prompts((5,))[0]
    found = app.post(URL, json={"prompt": ids, "max_tokens": 9, "sites": [3]}).json()
    assert [token["id"] for token in found["tokens"]] == ids + ANSWER
    assert (found["prompt_tokens"], found["total_tokens"]) == (5, 8)
    again = app.post(URL, json={"prompt": ids + ANSWER, "sites": [3]}).json()
    assert again["sites"] == found["sites"]
    some = {"prompt": ids, "max_tokens": 9, "sites": [3], "tokens": [6, 13]}
    assert [token["id"] for token in app.post(URL, json=some).json()["tokens"]] == [8]
    some["tokens"] = [13]
    nothing = app.post(URL, json=some).json()
    assert nothing["tokens"] == nothing["sites"][0]["weights"] == []


EDITS = [
    {"sites": [3, 4], "sources": ["embedding"], "tokens": [2, 3, 9], "mask": True},
    {"sites": [4], "sources": ["block 1"], "tokens": {"start": 1, "end": 8}, "scale": 0.5},
    {"sites": ["mlp 3"], "sources": ["block 1", "embedding"], "weights": [0.75, 0.25]},
]


def written_out(edits: list[dict], length: int) -> list[dict]:
    """The edits as ``edited_oracle`` takes them."""
    found = []
    for edit in edits:
        tokens = edit.get("tokens") or {}
        if isinstance(tokens, dict):
            tokens = list(range(tokens.get("start", 0), tokens.get("end", length)))
        sites = [7 if site == "mlp 3" else site for site in edit["sites"]]
        found.append(edit | {"tokens": tokens, "sites": sites})
    return found


@pytest.mark.parametrize("folder", [BLOCK, CUMULATIVE], ids=lambda folder: folder.name)
def test_edits(folder):
    """Of some tokens and sites: logprobs with the edits and without, and a lens with them."""
    (ids,) = fresh_prompts((15,))
    app, model = app_of(Client(folder)), oracle.load(folder)
    asked = {"prompt": ids, "edits": EDITS, "tokens": [2, 9, 14], "sites": [4, 7]}
    found = app.post(URL, json=asked | {"logprobs": 3, "lens": 2}).raise_for_status().json()
    assert [{k: v for k, v in edit.items() if v is not None} for edit in found["edits"]] == EDITS
    edits = written_out(EDITS, len(ids))
    weights, rms, logprobs = evaluate(model, ids, edits)
    assert [site["index"] for site in found["sites"]] == [4, 7]
    for site in found["sites"]:
        own = weights[site["index"]][[2, 9, 14]].numpy()
        np.testing.assert_allclose(site["weights"], own, atol=FAR)
        np.testing.assert_allclose(site["rms"], rms[site["index"]][[2, 9, 14]], rtol=FAR)
        entropy = -(own * np.log(np.where(own > 0, own, 1))).sum(-1)
        np.testing.assert_allclose(site["entropy"], entropy, atol=FAR)
    tables = {"edited": logprobs, "unedited": evaluate(model, ids, [])[2]}
    for name, table in tables.items():
        assert [row["position"] for row in found["logprobs"][name]] == [2, 9, 14]
        check_lens({name: found["logprobs"][name]}, {name: table}, ids)
        for row in found["logprobs"][name]:
            top = [(token["id"], token["text"]) for token in row["top"]]
            best = table[row["position"]].topk(3).indices.tolist()
            assert top == [(token, f"<{token}>") for token in best]
    by_key = {(one["site"], one["vector"]): one["predictions"] for one in found["lens"]}
    names = {
        (site["index"] if name == "partial" else None, name)
        for site in found["sites"]
        for name in site["sources"]
    }
    assert by_key.keys() == names | {(4, "mix"), (7, "mix")}
    read = lens(model, ids, edits)
    check_lens(by_key, {key: read[key] for key in by_key}, ids)
    assert [len(row["top"]) for row in by_key[7, "mix"]] == [2, 2, 2]


def test_a_lens_of_nothing(app):
    """It is null where it is not asked for, and empty where no site or token is left."""
    asked = {"prompt": [3] * 15, "sites": []}
    assert app.post(URL, json=asked).json()["lens"] is None
    asked |= {"lens": 1, "max_tokens": 9}
    assert app.post(URL, json=asked).json()["lens"] == []
    late = app.post(URL, json=asked | {"sites": [3], "tokens": [23]}).json()  # it ends early
    assert [one["predictions"] for one in late["lens"]] == [[]] * len(late["lens"]) != []


def test_an_answer_under_edits(client):
    """It is the float64 model's, ends at the end of text, and the engine generates nothing."""
    app, model = app_of(client), oracle.load(BLOCK)
    (ids,) = fresh_prompts((9,))
    edits = [{"sources": ["block 1"], "mask": True, "sites": [4, 6, 8]}]
    asked = {"prompt": ids, "max_tokens": 5, "edits": edits, "logprobs": 1}
    found = app.post(URL, json=asked).raise_for_status().json()
    answer = greedy(model, ids, written_out(edits, 14), 5)
    assert [token["id"] for token in found["tokens"]] == ids + answer
    assert (found["prompt_tokens"], found["total_tokens"], client.generated) == (9, 14, 0)
    own = found["logprobs"]["edited"][8:]
    assert [row["top"][0]["id"] for row in own[:-1]] == answer
    np.testing.assert_allclose(
        [row["next"] for row in own[:-1]], [row["top"][0]["logprob"] for row in own[:-1]]
    )
    client.end = answer[1]
    found = app.post(URL, json=asked).raise_for_status().json()
    assert [token["id"] for token in found["tokens"]] == ids + answer[
        : answer.index(client.end) + 1
    ]


@pytest.mark.parametrize("asked", [{"logprobs": 20, "edits": [{"scale": 1}]}, {"lens": 20}])
def test_predictions_are_bounded(app, client, asked):
    name, *_ = asked
    body = {"prompt": [3] * 4, "sites": [0], **asked}
    app.post(URL, json=body).raise_for_status()
    said = f"{name} is 21; expected at most 20 (--max-logprobs)"
    assert said in refused(app, 400, **body | {name: 21})
    app.app.state.args.attn_res_policy = Policy(max_trace_weights=4 * 41)
    app.post(URL, json=body).raise_for_status()
    said = refused(app, 400, **body | {"prompt": [3] * 5})
    assert "5 tokens x 1 sites and 40 logprobs have 205" in said
    client.vllm_config.model_config.max_logprobs = -1
    assert "at most 320 (--max-logprobs)" in refused(app, 400, **body | {name: 321})


def test_a_lens_is_bounded(app, client, monkeypatch):
    body = {"prompt": [3] * 4, "lens": 0, "sites": [0]}
    monkeypatch.setattr(readings, "MOST", 8)
    app.post(URL, json=body).raise_for_status()
    said = refused(app, 400, **body | {"prompt": [3] * 5})
    assert "5 tokens x 2 mixes and sums are 10" in said
    assert client.calls.count("attn_res_trace") == 1


def test_an_edit_of_a_final_norm_that_does_not_mix():
    """The sites that feed sublayers can be edited, and it is not among all of them."""
    app = app_of(Client(CUMULATIVE))
    last = len(oracle.load(CUMULATIVE).spec.layout)
    for site in ("final", last):
        said = refused(app, 400, prompt=[3], edits=[{"sites": [site], "mean": True}])
        assert f"site {last} (the final norm) of this model mixes no sources" in said
    app.post(URL, json={"prompt": [3], "edits": [{"mean": True}]}).raise_for_status()


@pytest.mark.parametrize("way", ["--override-generation-config", "--generation-config"])
def test_an_answer_is_as_long_as_the_generation_config_allows(app, client, tmp_path, way):
    """As those of vLLM's routes are; the checkpoint's own is a default there, not a bound."""
    config, bound = client.vllm_config.model_config, {"max_new_tokens": 2}
    if way == "--generation-config":
        (tmp_path / "generation_config.json").write_text(json.dumps(bound))
        config.generation_config = str(tmp_path)
    else:
        config.override_generation_config = bound
    for asked, got in ((1, 1), (3, 2)):
        found = app.post(URL, json={"prompt": [3], "max_tokens": asked, "sites": [0]}).json()
        assert found["total_tokens"] == 1 + got


@pytest.mark.parametrize(
    "asked", [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}], ids=str
)
def test_text_and_chat(app, asked, monkeypatch):
    """Their tokens are traced, and one that the model has no row for is refused."""
    found = app.post(URL, json=asked | {"model": "demo", "sites": [0]}).json()
    assert [token["id"] for token in found["tokens"]] == TEXT["hello"]
    monkeypatch.setitem(TEXT, "hello", [3, 320])
    assert "Token 320 is not in the vocabulary of 320" in refused(app, 400, **asked)


def edit(**fields: Any) -> dict[str, Any]:
    """A request of one edit."""
    return {"prompt": [3], "edits": [fields]}


def patch(text: str) -> dict[str, Any]:
    return edit(replace=text, sources=["embedding"])


def packed(values: Any) -> str:
    return b64encode(np.array(values, np.float32).tobytes()).decode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "exactly one of `prompt` and `messages`"),
        ({"prompt": "hello", "messages": []}, "exactly one of"),
        ({"prompt": 5}, "prompt: found 5; expected text or a list."),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [-1]}, "prompt[0]: "),
        ({"prompt": [320]}, "Token 320 is not in the vocabulary of 320 tokens"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role is missing; give it."),
        ({"prompt": [3], "max_tokens": -1}, "max_tokens: "),
        ({"prompt": [3], "max_tokens": 256}, "at most 256 tokens"),
        ({"prompt": [3], "tokens": {"start": 10**15}}, "range of tokens is empty"),
        ({"prompt": [3] * 257}, "at most 256 tokens"),
        ({"prompt": [3], "sites": [11]}, "no site 11; this model's are 0 to 10"),
        ({"prompt": [3], "sites": ["final"]}, "sites[0]: "),
        ({"prompt": [3], "tokens": [1]}, "no token 1; the sequence has at most 1"),
        ({"prompt": [3], "tokens": {"start": 1}}, "range of tokens is empty"),
        ({"prompt": [3], "tokens": {"from": 1}}, "tokens.from is no field that is read"),
        ({"prompt": [3], "site": [1]}, "site is no field that is read; leave it out."),
        ({"prompt": [3], "logprobs": -1}, "logprobs: "),
        ({"prompt": [3], "lens": -1}, "lens: "),
        (edit(), "edits[0]: give exactly one of `mask`, `force`, `weights`, `mean`, `scale`"),
        (edit(mask=False), "edits[0].mask: found false; expected true."),
        (edit(ban=False), "edits[0].ban: found false; expected true."),  # its first name
        (
            edit(weights=[-1, 2]),
            "edits[0].weights[0]: found -1; expected at least 0.",
        ),
        (edit(mean=True, site=3), "edits[0].site is no field that is read; leave it out."),
        (edit(mean=True, sites=[11]), "edits[0].sites: there is no site 11; this model's are 0"),
        (edit(mean=True, sites=["mlp 9"]), "there is no site mlp 9"),
        (edit(mean=True, sites=[]), "edits[0].sites is empty"),
        (edit(mean=True, sources=[]), "edits[0].sources is empty"),
        (edit(mean=True, sources=["partial", "partial"]), "sources names a source twice"),
        (
            edit(mean=True, sites=[3, 8], sources=["block 2"]),
            "edits[0].sources: site 3 (the MLP of layer 1) does not read block 2; it reads",
        ),
        (
            edit(mask=True, sites=[99]),
            "there is no site 99; this model's are 0 to 10, or of the kinds",
        ),
        (edit(force=True, sites=["norm"], tokens=[500]), "there is no site norm; this model's are"),
        (edit(scale=2, sites=[99], sources=[]), "there is no site 99"),
        (
            edit(mean=True, sources=["block 9"]),
            "edits[0].sources: no site of this model reads block 9; its sites read embedding, ",
        ),
        (edit(mean=True, tokens=[1]), "edits[0].tokens: there is no token 1; the sequence has"),
        (edit(mask=True), "edits[0].mask needs `sources`"),
        (edit(force=True, sources=["embedding", "partial"]), "needs exactly one of the sources"),
        (edit(mean=True, tokens=[]), "edits[0].tokens is empty; name a token, or leave it out"),
        (edit(replace=""), "edits[0].replace needs exactly one of the sources"),
        (patch("$"), "edits[0].replace cannot be read; expected base64 of float32 numbers."),
        (patch(packed([0] * 3)[:5]), "edits[0].replace cannot be read"),
        (patch(packed([0] * 3)), "has 3 numbers; expected the 64 of one vector, or 1 x 64, one"),
        (patch(packed([np.nan] * 64)), "edits[0].replace has a number that is not finite or is"),
        (patch(packed([2e15] * 64)), "is beyond 1e+15; expected vectors like the model's own."),
        (edit(weights=[0.5, 0.4]), "edits[0].weights have the sum 0.9; expected 1"),
        (edit(weights=[0.5, 0.5], sites=[0]), "weights has 2 numbers for 1 sources of site 0"),
        (
            edit(mask=True, sites=[0], sources=["embedding"]),
            "edits[0] leaves site 0 (the attention of layer 0) no source; leave at",
        ),
        (
            {
                "prompt": [3] * 9,
                "edits": [
                    {"sites": [3], "sources": ["embedding"], "force": True, "tokens": [4, 5]},
                    {"sites": [3], "sources": ["embedding"], "mask": True, "tokens": [5, 6]},
                ],
            },
            "edits[1] leaves site 3 (the MLP of layer 1) no source at token 5",
        ),
        (
            {"prompt": [3], "edits": [{"mean": True}] * 65},
            "edits: found 65 entries; expected",
        ),
        (
            {"prompt": [3], "edits": [{"mean": True}], "max_tokens": 65, "tokens": [999]},
            "max_tokens is 65; with edits expected at most 64",
        ),
    ],
    ids=str,
)
def test_a_bad_request_is_one_sentence(app, client, body, said):
    assert said in refused(app, 400, **body)
    assert "attn_res_trace" not in client.calls and client.generated == 0


def test_weights_that_change_while_a_trace_is_computed():
    """It would be of both."""
    client: Any = Client(BLOCK)
    asked = []

    async def version() -> str:
        asked.append(None)
        return "one" if len(asked) < 2 else "two"

    app = app_of(client)
    client.get_weight_version = version
    answer = app.post("/v1/attn_res/trace", json={"prompt": [1, 2]})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"].startswith("The weights were replaced while")
    assert app.post("/v1/attn_res/trace", json={"prompt": [1, 2]}).status_code == 200


def test_too_many_weights(app):
    """The limit is of tokens x sites x sources, tokens that may be generated too; it is named."""
    whole = app.post(URL, json={"prompt": [3]}).json()["sites"]
    each, last = sum(len(site["sources"]) for site in whole), len(whole[10]["sources"])
    app.app.state.args.attn_res_policy = Policy(max_trace_weights=10 * each)
    app.post(URL, json={"prompt": [3] * 10}).raise_for_status()
    for asked in ({"prompt": [3] * 11}, {"prompt": [3] * 10, "max_tokens": 1}):
        message = refused(app, 400, **asked)
        assert f"at most {10 * each} weights" in message and "--max-trace-weights" in message
        assert f"11 tokens x 11 sites have {11 * each}" in message
    app.post(URL, json={"prompt": [3] * 11, "tokens": {"end": 10}}).raise_for_status()
    app.post(URL, json={"prompt": [3] * 11, "sites": [10]}).raise_for_status()
    app.app.state.args.attn_res_policy = Policy(max_trace_weights=2 * last)
    app.post(URL, json={"prompt": [3] * 2, "sites": [10]}).raise_for_status()
    assert f"3 tokens x 1 sites have {3 * last}" in refused(app, 400, prompt=[3] * 3, sites=[10])


@pytest.mark.parametrize("folder", [BLOCK, CUMULATIVE], ids=lambda folder: folder.name)
def test_what_is_served_says_how_large_a_trace_may_be(folder):
    """By its numbers the largest trace is answered, and one more token is refused."""
    app = app_of(Client(folder))
    limits = app.get("/v1/attn_res").raise_for_status().json()["trace"]
    assert (limits["weights"], limits["lens"]) == (Policy().max_trace_weights, readings.MOST)
    each = limits["weights_per_token"] + 2 + 3 * limits["lens_per_token"]
    app.app.state.args.attn_res_policy = Policy(max_trace_weights=4 * each)
    assert app.get("/v1/attn_res").json()["trace"] == limits | {"weights": 4 * each}
    asked = {"logprobs": 2, "lens": 3}
    app.post(URL, json={"prompt": [3] * 4, **asked}).raise_for_status()
    assert f"have {5 * each}" in refused(app, 400, prompt=[3] * 5, **asked)


@pytest.mark.parametrize("folder", [BLOCK, CUMULATIVE], ids=lambda folder: folder.name)
def test_an_answer_with_vectors(folder):
    """A safetensors file of both stages' sites, with the trace that is answered without them."""
    (ids,), app, model = fresh_prompts((21,)), app_of(Client(folder)), oracle.load(folder)
    asked = {"prompt": ids, "tokens": [0, 7, 20], "logprobs": 1}
    answer = app.post(URL, json=asked | {"vectors": True}).raise_for_status()
    assert answer.headers["content-type"] == "application/octet-stream"
    found = load(answer.content)
    own = json.loads(bytes(found.pop("trace").tolist()))
    assert own == app.post(URL, json=asked).json()
    check_vectors(model, ids, [0, 7, 20], found)
    some = app.post(URL, json=asked | {"vectors": True, "sites": [7, 2], "tokens": [7]})
    few = load(some.content)
    few.pop("trace")
    assert few.keys() == {f"site.{at}.{part}" for at in (2, 7) for part in PARTS}
    assert all(own.equal(found[name][1:2]) for name, own in few.items())


def test_a_source_is_replaced(app):
    """By a vector of the request, which the answer reads; what other sites read is their own."""
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    edit = {"sites": [4], "sources": ["embedding"], "tokens": [1], "replace": packed(vector)}
    asked = {"prompt": [3, 4, 5], "edits": [edit], "vectors": True}
    found = load(app.post(URL, json=asked).raise_for_status().content)
    (told,) = json.loads(found["trace"].numpy().tobytes())["edits"]
    assert told["replace"] == "" and told["sites"] == [4]  # vectors are not sent back
    assert found["site.4.sources"][1, 0].numpy() == pytest.approx(vector)
    plain = load(app.post(URL, json=asked | {"edits": []}).content)
    assert found["site.3.output"].equal(plain["site.3.output"])
    assert not found["site.4.mix"][1].equal(plain["site.4.mix"][1])


def test_vectors_of_too_many_bytes(app):
    """Tokens x the sources of the sites, their mixes and outputs, each of 64 numbers of 4 bytes."""
    each = 4 * 64 * (2 + 2)  # site 3: the embedding and the partial sum
    app.app.state.args.attn_res_policy = Policy(max_trace_bytes=2 * each)
    asked = {"sites": [3], "vectors": True}
    answer = app.post(URL, json=asked | {"prompt": [3] * 2}).raise_for_status()
    sizes = [own.nbytes for name, own in load(answer.content).items() if name != "trace"]
    assert sum(sizes) == 2 * each
    said = refused(app, 400, **asked, prompt=[3] * 3)
    assert f"at most {2 * each} bytes (--max-trace-bytes)" in said
    assert f"3 tokens x 1 sites have {3 * each}" in said


def test_too_many_tokens(app):
    app.app.state.args.attn_res_policy = Policy(max_trace_tokens=20)
    app.post(URL, json={"prompt": [3] * 20, "sites": [0], "tokens": [0]}).raise_for_status()
    for asked in ({"prompt": [3] * 21}, {"prompt": [3], "max_tokens": 20}):
        message = refused(app, 400, **asked, sites=[0], tokens=[0])
        assert "at most 20 tokens (--max-trace-tokens)" in message


@pytest.mark.parametrize(("sublayers", "block"), [(128, 1), (16, 4)])
def test_the_largest_answer_is_some_megabytes(sublayers, block):
    """By default, where small weights take most characters: deep Full AttnRes, and few blocks."""
    spec = AttnResSpec(Layout.of(sublayers // 2), tuple(range(0, sublayers, block)), 1e-6)
    each = sum(site.num_sources for site in sites(spec))
    rows = Policy().max_trace_weights // each
    draw = np.random.default_rng(0)
    pieces = []
    for site in sites(spec):
        weights = draw.dirichlet(np.full(site.num_sources, 0.3), rows).astype(np.float32)
        sizes = draw.lognormal(size=weights.shape).astype(np.float32)
        pieces.append((site, weights.tobytes(), sizes.tobytes()))
    assert 4e6 < len(trace._encode({}, pieces, rows)) < 8e6


NAN = np.array([np.nan], np.float32).tobytes()


@pytest.mark.parametrize(
    ("problem", "sites", "asked", "said"),
    [
        ("the test says no.", [], {}, "^The test says no[.]$"),
        (None, [[0, NAN, NAN]], {"sites": [0]}, "infinite or NaN"),
    ],
)
def test_a_worker_that_fails_is_an_error(app, monkeypatch, problem, sites, asked, said):
    """As are weights that are not numbers, which are neither an answer nor the client's fault."""
    answer = {"problem": problem, "sites": sites} | NOTHING
    monkeypatch.setattr(WorkerExtension, "attn_res_trace", lambda *_: {**answer})
    assert re.search(said, refused(app, 500, prompt=[3], **asked))


def test_edits_in_proportion_to_the_sequence(app, client, monkeypatch):
    """Eight edits of everything pass, one more is too many; few tokens may always be edited."""
    monkeypatch.setattr(resolved_edits, "CHANGES", 100)
    every = {"scale": 1}
    asked = {"prompt": [3] * 9, "sites": [0]}
    app.post(URL, json=asked | {"edits": [every] * 8}).raise_for_status()
    client.calls.clear()
    said = refused(app, 400, **asked, edits=[every] * 9)
    assert "The edits change 891 tokens x sites" in said and "expected at most 792" in said
    assert "attn_res_trace" not in client.calls
    app.post(URL, json=asked | {"edits": [every | {"tokens": [0]}] * 64}).raise_for_status()
    app.post(URL, json={"prompt": [3], "edits": [every] * 9}).raise_for_status()


def test_unknown_model(app):
    assert "`nope` does not exist; there is `demo`, `tuned`." in refused(
        app, 404, model="nope", prompt=[3]
    )


@pytest.mark.parametrize(
    ("of", "key", "value", "status", "said"),
    [
        ("", "additional_config", {"attnres_trace": "off"}, 403, "--disable-trace"),
        (".model_config.hf_config", "attn_res", None, 400, "standard residuals"),
        (".model_config", "hf_config", LlamaConfig(), 400, "standard residuals"),  # vLLM's own
        (".parallel_config", "worker_extension_cls", "my.Own", 501, "--worker-extension-cls"),
    ],
    ids=["off", "standard", "vllms", "extension"],
)
def test_a_configuration_without_traces(app, client, of, key, value, status, said):
    setattr(attrgetter(f"vllm_config{of}")(client), key, value)
    assert said in refused(app, status, prompt=[3])
    assert client.calls == []


def test_a_client_that_has_gone_is_no_error_of_the_server(app, monkeypatch):
    async def gone(*_):
        return None

    monkeypatch.setattr(requests, "until_disconnect", gone)
    assert app.post(URL, json={"prompt": [3]}).status_code == 499


def test_untraceable(app, client):
    client.vllm_config.lora_config = object()
    assert "LoRA" in refused(app, 501, prompt=[3])


def test_asleep(app, client):
    client.asleep = client.vllm_config.model_config.enable_sleep_mode = True
    assert "asleep" in refused(app, 503, prompt=[3])


def test_the_engine_knows_a_trace_by_its_request_id(app, client):
    asked = {"prompt": [3], "max_tokens": 1, "sites": [0]}
    for headers in ({"X-Request-Id": "order-7"}, {}):
        assert app.post(URL, json=asked, headers=headers).status_code == 200
    first, second = client.names[-2:]
    assert first == "attn-res-trace-order-7" != second


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_given_up_is_not_traced(app, client, reason):
    client.ended_by = reason
    answer = app.post(URL, json={"prompt": [3], "max_tokens": 2, "sites": [0]})
    assert answer.status_code == 500 and "attn_res_trace" not in client.calls


def test_without_a_tokenizer(app, client):
    client.vllm_config.model_config.skip_tokenizer_init = True
    assert "give token ids" in refused(app, 400, prompt="hello")
    found = app.post(URL, json={"prompt": [3, 4], "sites": [0]}).json()
    assert [token["text"] for token in found["tokens"]] == [None, None]


def test_one_replay_at_a_time_and_none_for_who_left():
    """Two clients go away, one whose replay runs and one in the queue; the third is answered."""
    begun: list[int] = []
    running = most = 0

    async def collective_rpc(method: str, args: tuple) -> list[dict]:
        nonlocal running, most
        begun.append(args[0][0])
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return [{"problem": None, "sites": [[0, b"w", b"r"]]} | NOTHING]

    async def main() -> trace_answer.ReplayResult:
        state = SimpleNamespace(attn_res_replays=asyncio.Lock())
        client = SimpleNamespace(collective_rpc=collective_rpc)
        asked = [
            asyncio.ensure_future(
                replays.replay(state, client, replays.ReplayRequest([number], [0], [0]), [])
            )
            for number in range(3)
        ]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        asked[1].cancel()
        answer = await asked[2]
        assert not state.attn_res_replays.locked()
        return answer

    assert asyncio.run(main()).sites == {0: (b"w", b"r")}
    assert begun == [0, 2] and most == 1


@pytest.mark.parametrize("call", [0, 1])
def test_an_engine_that_dies_fails_who_waits_for_its_workers(app, client, monkeypatch, call):
    """Whichever call it was, and the next replay has its turn."""
    answer = client.collective_rpc

    async def dies(method: str, args: tuple = ()) -> list[Any]:
        if len(client.calls) == call:
            raise EngineDeadError
        return await answer(method, args)

    monkeypatch.setattr(client, "collective_rpc", dies)
    failed = metrics.traces.labels("failed")._value.get()
    assert app.post(URL, json={"prompt": [3], "sites": [0]}).status_code == 500
    assert metrics.traces.labels("failed")._value.get() == failed + 1
    assert not app.app.state.attn_res_replays.locked()


def test_numbers_are_short():
    """Six significant digits, whatever the size; zero stays zero."""
    values = np.array([0, 1.23456789e-12, 0.1234567, 123456789.0, 1], np.float32)
    found = trace_answer.short(values)
    np.testing.assert_allclose(found, values, rtol=1e-5)
    assert all(len(json.dumps(value)) <= 12 for value in found)
