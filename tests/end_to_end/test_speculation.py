"""Speculative decoding by drafts: the answers are those of the engine without them.

Greedy tokens do not depend on what is drafted, so every test also asks vLLM's counters: drafts were
proposed, and some but not all of them were accepted.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from shutil import copy
from typing import Any

import company
import pytest
import tiny_sites
import tokenizers
import torch
from adapters import WEIGHTS, linear_layers, targets, write_merged
from checkpoints import write_house, write_standard
from draft_heads import HEARD, add_head, write_eagle
from faults import metrics, until, value
from goldens import SMALL_GAP, check_answers
from jobs import engine_job, fresh_prompts, run_engine
from safetensors.torch import load_file, save_file
from serving import DEMO, ROOT, Server, draft_of_the_demo, running_demo
from torch import Tensor

from attnres_serve.families import FAMILIES
from attnres_serve.families.limits import Limit
from attnres_serve.verify.oracle import load
from attnres_serve.verify.rewritten import Rewritten
from tests.end_to_end.test_families import check_trace

pytestmark = pytest.mark.engine
EXHAUSTIVE, OF_FAMILIES = pytest.mark.exhaustive, pytest.mark.families

SHOWN = sorted(
    name
    for name, family in FAMILIES.items()
    if Limit.SHOWN_LAYERS not in family.limits and name != "llama"
)
TEXTS = (
    "import os\n\n\ndef ",
    "def read_file(path):\n    with open(",
    "class Reader:\n    def __init__(",
)
# The demo leaves no doubt about the 22 tokens that follow: 0.28 between two logprobs, or more.
SURE = "    def __repr__(self):\n        return "
LONG = SURE + TEXTS[1] * 20  # more than a block of the KV cache
DRAFTED = 3  # tokens, by the server
# Of hidden states in float32: ten times what is allowed elsewhere (``trace_cases``), as the norm on
# a recurrence's output makes small ones large.  The streams of a model are some tenths apart.
# `test_site_norm` holds them to what their sites read.
REACH = {"atol": 1e-3, "rtol": 1e-3}


def write_model(folder: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    """A model with the demo's vocabulary."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(DEMO / name, folder)
    return folder


def write_one_layer(folder: Path) -> Path:
    """The demo's first layer as a Llama with standard residuals."""
    config = json.loads((DEMO / "config.json").read_text())
    del config["attn_res"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    tensors = {
        name: t
        for name, t in load_file(DEMO / "model.safetensors").items()
        if "_res" not in name and ("layers." not in name or ".layers.0." in name)
    }
    return write_model(folder, config, tensors)


def make_bigram(folder: Path, answers: list[list[int]]) -> Path:
    """Let a Llama of one layer follow a token by the one seen after it first.

    The layer adds nothing, so that the head reads the token's embedding.
    """
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    embedding = torch.nn.functional.normalize(
        torch.randn(tensors["model.embed_tokens.weight"].shape)
    )
    head, seen = torch.zeros_like(embedding), set()
    for answer in answers:
        for token, follows in pairwise(answer):
            if token not in seen:
                seen.add(token)
                head[follows] += embedding[token]
    dtype = tensors["model.norm.weight"].dtype
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    tensors["model.embed_tokens.weight"] = embedding.to(dtype)
    tensors["lm_head.weight"] = head.to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def job(
    folder: Path, prompts: list[list[int]], mode: str, drafts: dict[str, Any], **options: Any
) -> dict:
    options |= {"disable_log_stats": False, "speculative_config": drafts}
    return engine_job(folder, prompts, "two_phase", mode, **options)


def answered(model: Any, asked: dict, folder: Path) -> dict:
    """The result of a job: every answer is the model's, and some but not all drafts are taken."""
    (result,) = run_engine([asked], folder / "run")["results"]
    check_answers(model, asked, result)
    counters = result["counters"]
    drafts, proposed, accepted = (
        counters.get(f"vllm:spec_decode_num_{what}", 0)
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert drafts > 0 and 0 < accepted < proposed, counters
    return result


def ways(first: str, *others: str, marks: pytest.MarkDecorator) -> list:
    """Each of them eager and compiled: the first eager, where ``marks`` run it compiled and the
    others eager, and in `make test-all` the rest."""
    rows = [pytest.param(first, "eager"), pytest.param(first, "compiled", marks=marks)]
    rows += [pytest.param(name, "eager", marks=marks) for name in others]
    return rows + [pytest.param(name, "compiled", marks=EXHAUSTIVE) for name in others]


@pytest.fixture(scope="module")
def demo_draft(tmp_path_factory) -> Path:
    """The demo's first layers, with sites of their own."""
    return draft_of_the_demo(tmp_path_factory.mktemp("draft") / "attnres")


@EXHAUSTIVE
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("draft", ["attnres", "standard"])
def test_draft_models(draft, mode, demo_draft, tmp_path):
    """A draft with sites of its own, as the server below has, and one with standard residuals."""
    encode = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode
    prompts = [encode(text).ids for text in TEXTS]
    model = load(DEMO)
    expected = [model.greedy(prompt, 16)[0] for prompt in prompts]
    folder = demo_draft
    if draft == "standard":
        folder = make_bigram(write_one_layer(tmp_path / draft), expected)
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    asked, heard = job(DEMO, prompts, mode, drafts), tmp_path / "heard.pt"
    asked |= {"workaround": "draft_heads:listen", "env": {HEARD: str(heard)}}
    result = answered(model, asked, tmp_path)
    for kind in ("alone", "batch"):
        assert [answer["tokens"] for answer in result[kind]] == expected
    if draft == "attnres":  # and the proposals are the draft's
        ids, _, _, following, proposed = torch.load(heard)[0]
        own, _, gaps = load(folder).greedy([*ids.tolist(), *following.tolist()], 3)
        assert min(gaps) > SMALL_GAP
        assert proposed.tolist() == [own]


@pytest.mark.parametrize(
    ("base", "mode"),
    ways(
        *("glm4_moe", "deepseek_v3", "glm4_moe_lite", "ernie4_5_moe", "exaone_moe", "qwen3_next"),
        "alice_ai",
        marks=OF_FAMILIES,
    ),
)
def test_heads_of_checkpoints(base, mode, tmp_path):
    """The class of the head gets what the family's heads read."""
    folder = write_house(tmp_path / base, base, layers=4, block_size=3, seed=31)
    prompts, model = fresh_prompts((7, 40, 1)), tiny_sites.load(folder)
    add_head(folder, base, [continued(model, prompt) for prompt in prompts])
    drafts, heard = {"method": "mtp", "num_speculative_tokens": 1}, tmp_path / "heard.pt"
    asked = job(folder, prompts, mode, drafts, enable_prefix_caching=False)
    asked |= {"workaround": "draft_heads:listen", "env": {HEARD: str(heard)}}
    answered(model, asked, tmp_path)
    ids, positions, hidden, *_ = torch.load(heard)[0]  # of the first prompt
    assert positions.tolist() == list(range(len(ids)))
    wanted = before(model, ids.tolist(), model.spec.final)["mixed"]
    if FAMILIES[base].draft.reads != "mixed":
        wanted = model.modules[-1](wanted)
    torch.testing.assert_close(hidden.double(), wanted, **REACH)


EAGLES = [("eagle", None), ("eagle3", "partial"), ("eagle3", "mixed")]


def marks_of(base: str, mode: str, stream: str | None) -> tuple[pytest.MarkDecorator, ...]:
    """A Llama's stream of mixes runs always, and compiled with the families."""
    if (base, stream) == ("llama", "mixed"):
        return (OF_FAMILIES,) if mode == "compiled" else ()
    return (EXHAUSTIVE,) if mode == "compiled" else (OF_FAMILIES,)


@pytest.mark.parametrize(
    ("base", "mode", "method", "stream"),
    [
        pytest.param(base, mode, method, stream, marks=marks_of(base, mode, stream))
        for base, mode, (method, stream) in product(
            ("llama", *SHOWN), ("eager", "compiled"), EAGLES
        )
    ],
)
def test_heads_of_other_folders(base, mode, method, stream, tmp_path):
    """EAGLE's reads what the last norm gives, EAGLE-3's the stream that is asked for."""
    count = 4
    folder = write_house(tmp_path / base, base, layers=count, block_size=3, seed=31)
    prompts, model = fresh_prompts((7, 40, 1)), tiny_sites.load(folder)
    answers = [continued(model, prompt) for prompt in prompts]
    layers = () if stream is None else (0, 2, count)
    head, heard = write_eagle(tmp_path / "head", folder, answers, layers), tmp_path / "heard.pt"
    drafts = {"method": method, "model": str(head), "num_speculative_tokens": 1}
    asked = job(folder, prompts, mode, drafts, enable_prefix_caching=False)
    asked |= {"workaround": "draft_heads:listen", "env": {HEARD: str(heard)}}
    asked["settings"] = {} if stream is None else {"attnres_aux_stream": stream}
    answered(model, asked, tmp_path)
    ids, _, hidden, *_ = torch.load(heard)[0]  # of the first prompt
    wanted = [before(model, ids.tolist(), first_site(model, layer)).get(stream) for layer in layers]
    if stream is None:
        wanted = [model.modules[-1](before(model, ids.tolist(), model.spec.final)["mixed"])]
    torch.testing.assert_close(hidden.double(), torch.cat(wanted, 1), **REACH)


@pytest.mark.parametrize(
    ("base", "mode"),
    ways(
        *("kimi_linear", "qwen3_next", "alice_ai", "gemma3_text", "gpt_oss"),
        marks=OF_FAMILIES,
    ),
)
def test_draft_models_beside_caches_of_two_kinds(base, mode, tmp_path):
    """A rejected draft leaves nothing in the states or the keys of another kind of layer.

    Nor does a request that is aborted between drafts, whose place in the batch another one takes.
    The draft's blocks are those of a group of their own.
    """
    folder = write_house(tmp_path / base, base, layers=4, block_size=3, seed=31)
    prompts, model = fresh_prompts((7, 90, 1)), tiny_sites.load(folder)
    answers = [continued(model, prompt) for prompt in prompts]
    draft = make_bigram(write_standard(tmp_path / "draft", layers=1, hidden=256), answers)
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    asked = job(folder, prompts, mode, drafts, enable_prefix_caching=False, leaves=2)
    answered(model, asked, tmp_path)


WAYS: dict[str, dict[str, Any]] = {
    "chunked prompts": {"chunk": 16},
    "two workers": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "an adapter": {"enable_lora": True, "max_lora_rank": 8},
    "traces": {"trace": True},
}


@EXHAUSTIVE
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("way", WAYS)
def test_beside_other_features(way, method, tmp_path):
    family = "glm4_moe" if method == "mtp" else "llama"
    base = write_house(tmp_path / "base", family, layers=4, block_size=3, seed=31, dtype="float32")
    served, options = base, dict(WAYS[way])
    if "enable_lora" in options:  # of attention, as no adapter may change experts
        layers = [name for name in linear_layers(load_file(base / WEIGHTS)) if "self_attn" in name]
        served, options["lora"] = (
            write_merged(tmp_path / "adapter", base, layers),
            tmp_path / "adapter",
        )
        options["lora_target_modules"] = targets(layers)
    prompts, model = fresh_prompts((7, 90, 1)), tiny_sites.load(served)
    answers = [continued(model, prompt) for prompt in prompts]
    drafts = {"method": method, "num_speculative_tokens": 1}
    if method == "mtp":
        add_head(base, family, answers)
    elif method == "draft_model":
        draft = write_standard(tmp_path / "draft", layers=1, hidden=64, dtype="float32")
        drafts["model"] = str(make_bigram(draft, answers))
    else:
        draft = write_eagle(tmp_path / "draft", base, answers, (0, 2, 4) * (method == "eagle3"))
        drafts["model"] = str(draft)
    asked = job(base, prompts, "eager", drafts, **options)
    asked["settings"] = {"attnres_aux_stream": "mixed"}
    result = answered(model, asked, tmp_path)
    if asked["trace"]:
        check_trace(model, max(prompts, key=len), result["trace"])


def first_site(model: Rewritten, layer: int) -> int:
    """The first site of a layer; the final one behind the last layer."""
    sites = (s for s, place in enumerate(model.spec.layout) if place.layer == layer)
    return next(sites, model.spec.final)


def before(model: Rewritten, ids: list[int], site: int) -> dict[str, Tensor]:
    """What heads may read in front of a site, by the float64 model: both streams."""
    stream = model.run(ids, mix=model.mixed).stream[: site + 1]
    y = [after - earlier for earlier, after in pairwise(stream)]
    last = model.depth.sources(site, stream[0], y)[-1]
    return {"partial": last, "mixed": model.mix(site, stream[0], y) if site else last}


def continued(model: Any, prompt: list[int]) -> list[int]:
    """A prompt and its greedy answer."""
    ids = list(prompt)
    for _ in range(16):
        ids.append(int(model.logprobs(ids)[-1].argmax()))
    return ids


@pytest.fixture(scope="module")
def server(demo_draft, tmp_path_factory) -> Iterator[Server]:
    """The demo with drafts of its own first layers, in float32, with prompts in chunks."""
    folder = tmp_path_factory.mktemp("server")
    drafts = {"method": "draft_model", "model": str(demo_draft)}
    drafts |= {"num_speculative_tokens": DRAFTED}
    flags = ("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "16")
    flags += ("--speculative-config", json.dumps(drafts), "--max-num-seqs", "8")
    with running_demo(folder / "log", *flags) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    """The tokens that the float64 model has for texts."""
    encode = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode
    model = load(DEMO)
    return {text: model.greedy(encode(text).ids, 22)[0] for text in (*TEXTS, SURE, LONG)}


def given(server: Server, prompt: str, **options: Any) -> list[list[int]]:
    """The tokens of each choice."""
    answer = server.complete(prompt, **{"return_token_ids": True, "max_tokens": 22} | options)
    return [choice["token_ids"] for choice in answer["choices"]]


def together(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[list[list[int]]]:
    """The tokens of each choice of every request, eight requests at a time."""
    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(lambda one: given(server, one[0], **one[1]), asked)]


def test_an_answer_ends_where_it_would_without_drafts(server, greedy):
    """Whether its end is a number, a token or a string, at every place in a draft."""
    decode = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).decode
    asked, wanted = [], []
    for text in TEXTS[:2]:
        tokens = greedy[text]
        for count in range(1, DRAFTED + 3):  # the first token, one draft, and one more
            asked += [(text, {"max_tokens": count}), (text, {"stop_token_ids": [tokens[count]]})]
            wanted += [tokens[:count], tokens[: tokens.index(tokens[count]) + 1]]
    assert together(server, asked) == [[tokens] for tokens in wanted]
    for text in TEXTS[:2]:
        tokens = greedy[text]
        whole = decode(tokens)
        for begin, size in ((3, 1), (7, 4), (12, 9)):  # within a token, and over several
            stop = whole[begin : begin + size]
            (choice,) = server.complete(text, max_tokens=22, stop=stop)["choices"]
            assert choice["text"] == whole[: whole.index(stop)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_prefix_comes_from_the_cache(server, greedy):
    hits = "vllm:prefix_cache_hits_total"
    assert given(server, LONG) == [greedy[LONG]]
    before = value(metrics(server), hits)
    assert given(server, LONG) == [greedy[LONG]]
    assert value(metrics(server), hits) > before


@pytest.mark.parametrize("check", company.WITH_DRAFTS, ids=lambda check: check.__name__)
def test_an_answer_is_the_same_in_any_company(check, server):
    check(server)


def test_every_request_is_judged_by_its_own_temperature(server, greedy):
    """Several at a time: greedy ones, ones that as good as are, and others that are not."""
    hot = [(SURE, {"temperature": 2.0})] * 2
    sure = [{"temperature": 0.01, "n": 3}, {"temperature": 2.0, "top_k": 1}]
    sure += [{"temperature": 2.0, "top_p": 1e-6}, {}]
    alike = [*((SURE, options) for options in sure), *((text, {}) for text in greedy)]
    *others, found = together(server, [*hot, *alike])[::-1]
    for (text, options), tokens in zip(alike[::-1], others, strict=False):
        assert tokens == [greedy[text]] * options.get("n", 1)
    assert found != [greedy[SURE]]


def test_a_client_that_leaves_changes_no_other_answer(server, greedy):
    """It leaves while its next tokens are drafted; others of the batch and later ones stay."""
    long = {"prompt": TEXTS[0], "max_tokens": 200, "n": 2, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        for lines in (2, 7):
            others = [pool.submit(given, server, text) for text in greedy]
            with server.client.stream("POST", "/v1/completions", json=long) as answer:
                told = answer.iter_lines()
                for _ in range(lines):
                    next(told)
            for text, other in zip(greedy, others, strict=True):
                assert other.result() == [greedy[text]]
    until(lambda: value(metrics(server), "vllm:num_requests_running") == 0, 120)
    assert together(server, [(text, {}) for text in greedy]) == [[t] for t in greedy.values()]


def test_a_server_counts_drafts(server):
    """As the documentation names its counters."""
    page = (ROOT / "docs" / "use" / "speculation.md").read_text()
    names = re.findall(r"`vllm:spec_decode_num_(\w+)_total`", page)
    for text in TEXTS:
        server.complete(text)
    said = metrics(server)
    counted = {
        name: [
            float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", said, re.M)
        ]
        for name in (f"spec_decode_num_{name}" for name in names)
    }
    each, proposed, accepted, places = counted.values()
    assert 0 < accepted[0] < proposed[0] <= DRAFTED * each[0]
    assert len(places) == DRAFTED and sum(places) == accepted[0]


# Models whose greedy answers to these prompts fall into cycles of two or three tokens.
CYCLES = {"llama": 22, "kimi_linear": 33}


@EXHAUSTIVE
@pytest.mark.parametrize("base", CYCLES)
def test_ngrams(base, tmp_path):
    """The model's own text is searched for what followed the last tokens before."""
    folder = write_house(tmp_path / base, base, layers=4, block_size=3, seed=CYCLES[base])
    prompts = [[17, 23, 5, 99] * 12, [3, 4] * 40]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    ngram |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    asked = job(folder, prompts, "eager", ngram, enable_prefix_caching=False)
    answered(tiny_sites.load(folder), asked, tmp_path)
