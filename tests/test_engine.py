"""Random checkpoints through the engine against independent float64 models: other shapes and scales
and variants of every format, zero queries, and plain vLLM where the two must be equal."""

import itertools
import random

import pytest
from checkpoints import (
    write_fla,
    write_house,
    write_kimi_names,
    write_mode,
    write_standard,
    write_titan,
)
from serving import (
    bound,
    check_against,
    check_executed,
    engine_job,
    fresh_prompts,
    run_engine,
)

from attnres_serve.convert import convert
from attnres_serve.oracle import load
from attnres_serve.settings import ALGORITHMS

pytestmark = pytest.mark.engine

# What each checkpoint stresses.
CHECKPOINTS = {
    "house_llama_full": (write_house, {"base": "llama", "layers": 3, "block_size": 1}),
    "house_llama_s2": (write_house, {"base": "llama", "layers": 4, "block_size": 2}),
    "house_qwen2_s4_short_last": (write_house, {"base": "qwen2", "layers": 5, "block_size": 4}),
    "house_qwen3_s6": (write_house, {"base": "qwen3", "layers": 6, "block_size": 6}),
    "house_odd_size": (write_house, {"base": "llama", "layers": 4, "block_size": 3}),
    "house_uneven": (write_house, {"base": "qwen3", "layers": 4, "block_starts": [0, 1, 5]}),
    "house_one_block": (write_house, {"base": "llama", "layers": 3, "block_size": 100}),
    "house_one_layer": (write_house, {"base": "qwen2", "layers": 1, "block_size": 1}),
    "house_no_final_mix": (
        write_house,
        {"base": "llama", "layers": 4, "block_size": 4, "final_mix": False},
    ),
    "house_key_eps_tied": (
        write_house,
        {"base": "llama", "layers": 3, "block_size": 2, "key_norm_eps": 1e-2, "tie": True},
    ),
    "house_small_scale": (
        write_house,
        {"base": "qwen3", "layers": 4, "block_size": 2, "scale": 0.02},
    ),
    "fla_gqa": (write_fla, {"block_size": 4, "kv_heads": 1}),
    "fla_mha_bias_null_sizes": (
        write_fla,
        {"block_size": 2, "kv_heads": None, "intermediate": None, "qkv_bias": True},
    ),
    "fla_qk_norm_bias_tied": (
        write_fla,
        {"block_size": 1, "layers": 3, "qk_norm": True, "qkv_bias": True, "tie": True},
    ),
    "fla_window": (write_fla, {"block_size": 4, "window_size": 24}),
    "fla_window_qk_norm": (write_fla, {"block_size": 2, "window_size": 24, "qk_norm": True}),
    "fla_window_bias": (write_fla, {"block_size": 2, "window_size": 24, "qkv_bias": True}),
    "fla_standard_twin": (write_fla, {"block_size": None, "qk_norm": True}),
    "house_variants": (
        write_house,
        {
            "base": "qwen2",
            "layers": 4,
            "block_starts": [0, 1, 5],
            "attn_res": {
                "cumulative": True,
                "recency_bias": True,
                "logit_scale": 0.5,
                "shared_queries": "block",
            },
        },
    ),
    "house_bias_on_blocks": (
        write_house,
        {
            "base": "llama",
            "layers": 3,
            "block_size": 3,
            "attn_res": {"recency_bias": True, "shared_queries": "layer"},
        },
    ),
    "house_qk_norm_eps": (
        write_house,
        {"base": "qwen3", "layers": 2, "block_size": 2, "qk_norm_eps": 0.1},
    ),
    "qwen3_ar": (write_kimi_names, {"layers": 5, "block_layers": 2}),
    "qwen3_ar_no_route_tied": (
        write_kimi_names,
        {"layers": 3, "block_layers": 1, "output_route": False, "tie": True},
    ),
    "qwen3_ar_standard_twin": (write_kimi_names, {"block_layers": None}),
    "open_attnres_short_last": (
        write_mode,
        {"layers": 5, "num_blocks": 3, "cumulative": True, "heads": 4, "kv_heads": 2},
    ),
    "open_attnres_full_small_scale": (
        write_mode,
        {"layers": 3, "mode": "full", "cumulative": True, "scale": 0.02},
    ),
    "delta_attnres_llama": (write_mode, {"base": "llama", "layers": 5, "num_blocks": 2}),
    "delta_attnres_full_tied": (write_mode, {"layers": 3, "mode": "full", "tie": True}),
    "torchtitan_floor": (write_titan, {"layers": 5, "num_blocks": 2}),
    "torchtitan_more_blocks": (write_titan, {"layers": 3, "num_blocks": 2}),
}


def algorithm_of(name: str) -> str | None:
    """The algorithm that a checkpoint is served with, None for a standard-residual twin.

    One each, in turn, to save time: test_residual.py has all of them for any specification.
    """
    if name.endswith("standard_twin"):
        return None
    return ALGORITHMS[list(CHECKPOINTS).index(name) % len(ALGORITHMS)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Every checkpoint, in one process."""
    root = tmp_path_factory.mktemp("checkpoints")
    random.seed()  # fresh prompts; a failure prints what it needs
    jobs = {}
    for name, (write, options) in CHECKPOINTS.items():
        write(root / name, seed=random.randrange(10**6), **options)
        jobs[name] = engine_job(root / name, fresh_prompts((7, 190)), algorithm_of(name))
    results = run_engine(list(jobs.values()), root / "run")["results"]
    return root, dict(zip(jobs, zip(jobs.values(), results, strict=True), strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_random_checkpoint_equals_the_float64_model(served, name):
    root, runs = served
    model, (job, result), algorithm = load(root / name), runs[name], algorithm_of(name)
    found = []
    for kind in ("alone", "batch"):
        for prompt, answer in zip(job["prompts"], result[kind], strict=True):
            where = f"{algorithm}, {kind}, {len(prompt)} tokens"
            found += check_against(model, prompt, answer, where)
    longest = max(job["prompts"], key=len)
    assert result["cached"]["cached"] > 0
    found += check_against(model, longest, result["cached"], f"{algorithm}, cached")
    if algorithm:
        check_executed(result, algorithm, compiled=False)
    assert not found, "\n".join(found)


BASES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def zero_queries(tmp_path_factory):
    """Standard checkpoints with unit-scale embeddings, the same with zero queries, both served."""
    root = tmp_path_factory.mktemp("zero")
    prompts = fresh_prompts((5, 40, 180))
    for base in BASES:
        write_standard(root / base, base=base, layers=4, seed=11, scale=UNIT_SCALE)
        convert(str(root / base), str(root / f"{base}_zero"), zero_queries_block_size=3)
    plain_jobs = [engine_job(root / base, prompts, None) for base in BASES]
    plain = run_engine(plain_jobs, root / "plain", VLLM_PLUGINS="")
    assert not plain["plugin_loaded"]
    chosen = zip(BASES, itertools.cycle(ALGORITHMS), strict=False)
    jobs = [engine_job(root / f"{base}_zero", prompts, algorithm) for base, algorithm in chosen]
    ours = run_engine(jobs, root / "ours")["results"]
    return dict(zip(BASES, zip(plain["results"], ours, strict=True), strict=True))


# Activations large against eps, so that n^2 eps does not matter.
UNIT_SCALE = 1.0


@pytest.mark.parametrize("base", BASES)
def test_zero_queries_equal_the_original_in_plain_vllm(zero_queries, base):
    plain, ours = zero_queries[base]
    for wanted, found in zip(plain["alone"], ours["alone"], strict=True):
        assert found["tokens"] == wanted["tokens"]
        for key in ("prompt_logprobs", "logprobs"):
            for a, b in zip(found[key], wanted[key], strict=True):
                assert abs(a - b) <= bound(b)


def test_zero_queries_at_small_scale_equal_the_scaled_eps_model(tmp_path):
    """Where activations are near eps, zero queries are the standard model with n^2 eps a site."""
    write_standard(tmp_path / "base", base="llama", layers=4, seed=5, scale=0.02)
    convert(str(tmp_path / "base"), str(tmp_path / "zero"), zero_queries_block_size=3)
    prompts = fresh_prompts((6, 50, 150))
    jobs = [engine_job(tmp_path / "zero", prompts, algorithm) for algorithm in ALGORITHMS]
    results = run_engine(jobs, tmp_path / "run")["results"]
    scaled = load(tmp_path / "base", eps_scale=True, block_starts=[0, 3, 6])
    plain = load(tmp_path / "base")
    shift = (scaled.logprobs(prompts[1]) - plain.logprobs(prompts[1])).abs().max()
    assert shift > 1e-2, "the scale hides the eps, so this test would prove nothing"
    for algorithm, result in zip(ALGORITHMS, results, strict=True):
        for prompt, answer in zip(prompts, result["alone"], strict=True):
            assert not check_against(scaled, prompt, answer, algorithm)
