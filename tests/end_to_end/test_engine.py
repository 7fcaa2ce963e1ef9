"""Random checkpoints through the engine against independent float64 models: other shapes and scales
and variants of every format, zero queries, and plain vLLM where the two must be equal."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_process
import pytest
import scaled_eps
import torch
from checkpoints import (
    EVERY_OPTION,
    write_baseline,
    write_fla,
    write_house,
    write_kimi_names,
    write_mode,
    write_standard,
    write_titan,
)
from goldens import check_against, check_all_against, check_executed, judge_of
from jobs import engine_job, fresh_prompts, run_named
from safetensors.torch import load_file, save_file
from serving import DEMO

from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify.oracle import load
from tests.end_to_end.test_families import chosen

pytestmark = pytest.mark.engine

# What each checkpoint stresses, by what writes it.
OPTIONS: dict[Callable[..., Any], dict[str, dict[str, Any]]] = {
    write_house: {
        "house_llama_full": {"base": "llama", "layers": 3, "block_size": 1},
        "house_llama_s2": {"base": "llama", "layers": 4, "block_size": 2},
        "house_qwen2_s4_short_last": {"base": "qwen2", "layers": 5, "block_size": 4},
        "house_qwen3_s6": {"base": "qwen3", "layers": 6, "block_size": 6},
        "house_odd_size": {"base": "llama", "layers": 4, "block_size": 3},
        "house_uneven": {"base": "qwen3", "layers": 4, "block_starts": [0, 1, 5]},
        "house_one_block": {"base": "llama", "layers": 3, "block_size": 100},
        "house_one_layer": {"base": "qwen2", "layers": 1, "block_size": 1},
        "house_no_final_mix": {"base": "llama", "layers": 4, "block_size": 4, "final_mix": False},
        "house_key_eps_tied": {"base": "llama", "layers": 3, "block_size": 2, "key_norm_eps": 1e-2}
        | {"tie": True},
        "house_small_scale": {"base": "qwen3", "layers": 4, "block_size": 2, "scale": 0.02},
        "house_variants": {"base": "qwen2", "layers": 4, "block_starts": [0, 1, 5]}
        | {"attn_res": EVERY_OPTION},
        "house_bias_on_blocks": {"base": "llama", "layers": 3, "block_size": 3}
        | {"attn_res": {"recency_bias": True, "shared_queries": "layer"}},
        "house_qk_norm_eps": {"base": "qwen3", "layers": 2, "block_size": 2}
        | {"changes": {"qk_norm_eps": 0.1}},
        "house_of_normed_llama": {"base": "normed_llama", "layers": 2, "block_size": 2}
        | {"changes": {"qk_norm_eps": 0.1, "scale_embeds": True}},
    },
    write_fla: {
        "fla_gqa": {"block_size": 4, "kv_heads": 1},
        "fla_mha_bias_null_sizes": {"block_size": 2, "kv_heads": None, "intermediate": None}
        | {"qkv_bias": True},
        "fla_qk_norm_bias_tied": {"block_size": 1, "layers": 3, "qk_norm": True, "qkv_bias": True}
        | {"tie": True},
        "fla_window": {"block_size": 4, "window_size": 24},
        "fla_window_qk_norm": {"block_size": 2, "window_size": 24, "qk_norm": True},
        "fla_window_bias": {"block_size": 2, "window_size": 24, "qkv_bias": True},
        "fla_standard_twin": {"block_size": None, "qk_norm": True},
    },
    write_kimi_names: {
        "qwen3_ar": {"layers": 5, "block_layers": 2},
        "qwen3_ar_no_route_tied": {"layers": 3, "block_layers": 1, "output_route": False}
        | {"tie": True},
        "qwen3_ar_standard_twin": {"block_layers": None},
    },
    write_mode: {
        "open_attnres_short_last": {"layers": 5, "num_blocks": 3, "cumulative": True, "heads": 4}
        | {"kv_heads": 2},
        "open_attnres_full_small_scale": {"layers": 3, "mode": "full", "cumulative": True}
        | {"scale": 0.02},
        "delta_attnres_llama": {"base": "llama", "layers": 5, "num_blocks": 2},
        "delta_attnres_full_tied": {"layers": 3, "mode": "full", "tie": True},
    },
    write_baseline: {
        "baseline_odd_size": {"layers": 4, "size": 3, "heads": 4, "kv_heads": 2}
        | {"attention_bias": True, "mlp_bias": True},
        "baseline_every_layer_tied": {"size": 1, "tie": True},
        "baseline_scaled": {"size": 4, "use_qk_norm": True, "scale_embeds": True, "scale": 0.1},
        "baseline_bare_scaled": {"size": None, "layers": 7, "use_qk_norm": False}
        | {"scale_embeds": True, "scale": 0.1},
        "baseline_bare": {"size": 4, "layers": 2, "use_qk_norm": False},
    },
    write_titan: {
        "torchtitan_floor": {"layers": 5, "num_blocks": 2},
        "torchtitan_more_blocks": {"layers": 3, "num_blocks": 2},
    },
}
CHECKPOINTS = {
    name: (maker, options) for maker, own in OPTIONS.items() for name, options in own.items()
}


def algorithm_of(name: str) -> str | None:
    """The algorithm that a checkpoint is served with, None for a standard-residual twin.

    One each, in turn, to save time: test_site_norm.py has all of them for any specification.
    """
    if name.endswith("standard_twin"):
        return None
    return ALGORITHMS[list(CHECKPOINTS).index(name) % len(ALGORITHMS)]


# Every option of a specification, and a window: in an engine, which batches, caches and goes on.
IN_ENGINES = ("house_variants", "fla_window_bias")
OTHERS = tuple(name for name in CHECKPOINTS if name not in IN_ENGINES)


def write(root: Path, name: str) -> Path:
    """Write a checkpoint with a seed that is new."""
    maker, options = CHECKPOINTS[name]
    maker(root / name, seed=random.randrange(10**6), **options)
    return root / name


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Serve checkpoints in one process: job and result by name."""
    random.seed()  # fresh prompts; a failure prints what it needs
    root = tmp_path_factory.mktemp("checkpoints")
    jobs = {
        name: engine_job(write(root, name), fresh_prompts((7, 190)), algorithm_of(name))
        for name in chosen(request, "name")
    }
    return root, run_named(jobs, root / "run")


@pytest.mark.parametrize(
    "name", [*IN_ENGINES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_random_checkpoint_equals_the_float64_model(served, name):
    (root, runs), algorithm = served, algorithm_of(name)
    job, result = runs[name]
    check_all_against(load(root / name), job, result)
    if algorithm:
        check_executed(result, algorithm, compiled=False)


@pytest.fixture(scope="module")
def world():
    with in_process.world(DEMO):
        yield


def pass_over(folder: Path, prompt: list[int], options: dict[str, str]) -> dict[str, list]:
    """The logprobs of a prompt, as an engine's answer of no token has them."""
    logprobs = in_process.serve(folder, prompt, additional_config=options)
    of_tokens = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return {"tokens": [], "logprobs": [], "prompt_logprobs": of_tokens.tolist()}


@pytest.mark.parametrize("name", OTHERS)
def test_a_pass_equals_the_float64_model(world, name, tmp_path):
    """vLLM's model and loader in this process, without an engine."""
    random.seed()
    folder = write(tmp_path, name)
    algorithm = algorithm_of(name) or "auto"
    options = {"attnres_backend": "torch", "attnres_algorithm": algorithm}
    judge = judge_of(load(folder))
    for prompt in fresh_prompts((7, 190)):
        assert not check_against(judge, prompt, pass_over(folder, prompt, options), name)


def test_zero_queries_at_small_scale_equal_the_scaled_eps_model(world, tmp_path):
    """Where activations are near eps, zero queries are the standard model with n^2 eps a site."""
    write_standard(tmp_path / "base", base="llama", layers=4, seed=5, scale=0.02)
    convert(str(tmp_path / "base"), str(tmp_path / "zero"), zero_queries_block_size=3)
    prompts = fresh_prompts((6, 50, 150))
    scaled = scaled_eps.load(tmp_path / "base", [0, 3, 6])
    plain = load(tmp_path / "base")
    shift = (scaled.logprobs(prompts[1]) - plain.logprobs(prompts[1])).abs().max()
    assert shift > 1e-2, "the scale hides the eps, so this test would prove nothing"
    judge = judge_of(scaled)
    for algorithm, prompt in itertools.product(ALGORITHMS, prompts):
        options = {"attnres_backend": "torch", "attnres_algorithm": algorithm}
        answer = pass_over(tmp_path / "zero", prompt, options)
        assert not check_against(judge, prompt, answer, algorithm)


@pytest.mark.usefixtures("world")
def test_tensors_that_predict_further_tokens_change_nothing(tmp_path: Path) -> None:
    folder = write_house(tmp_path / "model", "llama", block_size=3, layers=3)
    ids = list(range(3, 20))
    before = in_process.serve(folder, ids)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.layers.0.mlp_res_norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert in_process.serve(folder, ids).equal(before)
