"""Sites with edits in their queries and biases, against traces and the float64 model."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import EVERY_OPTION, write_baseline, write_house
from edited_oracle import evaluate, of_a_model, static
from jobs import fresh_prompts

pytest.importorskip("vllm")

from in_process import load, serve, vllm_config, world
from trace_cases import BLOCK, FAR, LOGPROBS, replayed, worker_of
from vllm.config import set_current_vllm_config

from attnres_serve.depth.static_edits import from_json, resolve
from attnres_serve.errors import SettingError
from attnres_serve.model import replacing
from attnres_serve.model.config import spec_of
from attnres_serve.verify import oracle

LENGTH = 12
TORCH = {"attnres_backend": "torch"}
MADE: dict[str, Any] = {
    "fla": lambda folder: BLOCK,
    "cumulative": lambda folder: write_baseline(folder, size=3, layers=3),
    "shared": lambda folder: write_house(
        folder, "qwen3", layers=4, block_starts=[0, 1, 5], attn_res=EVERY_OPTION
    ),
    "recency": lambda folder: write_house(
        folder, layers=3, block_size=3, attn_res={"recency_bias": True}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(BLOCK):
        yield


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request, tmp_path_factory) -> Path:
    return MADE[request.param](tmp_path_factory.mktemp("edited") / "checkpoint")


def logprobs(folder: Path, ids: list[int], edits: list[dict], **own: Any) -> torch.Tensor:
    own = {"attnres_backend": "torch", "attnres_edits": edits} | own
    return serve(folder, ids, additional_config=own).double()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ["single_pass", "two_phase"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_an_edited_model_is_the_edited_trace(checkpoint, algorithm, backend, seed):
    """Both are the float64 model with the same edits, which it applies by its own lines."""
    random.seed(f"{checkpoint} {algorithm} {backend} {seed}")
    model = oracle.load(checkpoint)
    (ids,) = fresh_prompts((LENGTH,))
    edits = static(model, LENGTH)
    every, _, wanted = evaluate(model, ids, edits)
    own = {"attnres_algorithm": algorithm, "attnres_backend": backend}
    asked = [*map(of_a_model, edits)]
    found = logprobs(checkpoint, ids, asked, **own)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    traced = replayed(worker_of(checkpoint, algorithm, backend, 5), ids, asked)
    for (_, site), weights in zip(sorted(traced.traces.items()), every, strict=True):
        torch.testing.assert_close(site.weights.double(), weights, atol=FAR, rtol=0)
    own_next = traced.predicted[2][:-1].double()
    following = torch.tensor(ids[1:])[:, None]
    torch.testing.assert_close(
        own_next, found[:-1].gather(1, following)[:, 0], atol=LOGPROBS, rtol=0
    )


MASK = {"sites": [3], "sources": ["embedding"], "mask": True}
SCALE = {"sites": [3, 5, "final"], "scale": 0.5}


def test_edits_take_each_others_place(checkpoint):
    """A later set is written over what was loaded."""
    model = load(
        vllm_config(checkpoint, additional_config={"attnres_edits": [MASK, SCALE]} | TORCH)
    )
    edited = state(model)
    spec = spec_of(model.config)
    model.attn_res_edited.change(resolve(from_json([SCALE], "x"), spec))
    once = state(
        load(vllm_config(checkpoint, additional_config={"attnres_edits": [SCALE]} | TORCH))
    )
    assert same(state(model), once) and not same(edited, once)
    model.attn_res_edited.change({})
    mixing = [norm for norm in model.attn_res_sites.values() if norm.site.mixes]
    own = load(vllm_config(checkpoint, additional_config=TORCH)).attn_res_sites
    for norm in mixing:
        assert norm.query.equal(own[norm.site.index].query)
        loaded = own[norm.site.index].bias
        assert norm.bias.equal(torch.zeros_like(norm.bias) if loaded is None else loaded)
    model.attn_res_edited.change(resolve(from_json([MASK, SCALE], "x"), spec))
    assert same(state(model), edited)


def state(model) -> dict[str, torch.Tensor]:
    """Queries and biases of a model, by their names."""
    every = model.named_parameters()
    return {name: x.clone() for name, x in every if name.endswith((".query", "norm.bias"))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_weights_that_take_the_place_of_others_are_edited_too(checkpoint):
    """Those of the same folder give the same model again."""
    config = vllm_config(checkpoint, additional_config={"attnres_edits": [MASK, SCALE]} | TORCH)
    model = load(config)
    edited = state(model)
    worker = SimpleNamespace(
        get_model=lambda: model, model_config=config.model_config, model_runner=SimpleNamespace()
    )
    with set_current_vllm_config(config), torch.inference_mode():
        replacing.from_folder(worker, str(checkpoint))
    assert same(state(model), edited)


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        ([{"sites": [99], "mean": True}], "there is no site 99"),
        ([MASK | {"tokens": [3]}], "holds for every token"),
    ],
)
def test_edits_that_cannot_be_served(edits, sentence):
    config = vllm_config(BLOCK, additional_config={"attnres_edits": edits} | TORCH)
    with pytest.raises(SettingError, match=sentence):
        load(config)
