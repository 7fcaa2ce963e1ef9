"""BabyLM's nanoGPT: config.json, tensors, the oracle, and what is served."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, config_of, edit
from goldens import check_executed, check_job, expected
from jobs import engine_job, run_engine
from on_file import Sentence

from attnres_serve.checkpoints import checked
from attnres_serve.checkpoints.names import expected_parts
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.resolve import resolve

BLOCK, SMALL = "nanogpt_block", "nanogpt_bias_small_scale"
WEIGHTS = "model.safetensors"
MISSING = ...


def golden(name: str = BLOCK, **changes: Any) -> dict[str, Any]:
    return config_of(GOLDENS / name, **changes)


# --- config.json


def test_goldens() -> None:
    """The class that one brings along is not needed.

    The other has biases everywhere and a head of its own; the key norms keep their eps.
    """
    parsed = resolve(golden(), trusts_code=True)
    assert parsed == resolve(golden()) and parsed.family == "gated_llama"
    assert parsed.spec == AttnResSpec(Layout.of(6), (0, 4, 8), 1e-5, final_mix=True)
    assert parsed.config["max_position_embeddings"] == 256
    parsed = resolve(golden(SMALL))
    assert parsed.config["attention_bias"] is parsed.config["mlp_bias"] is True
    assert parsed.config["tie_word_embeddings"] is False
    assert parsed.config["rms_norm_eps"] == 1e-6 and parsed.spec.key_norm_eps == 1e-5
    assert parsed.config["rope_parameters"]["rope_theta"] == 5000.0


def test_variants_that_are_served() -> None:
    """Without a gate it is a plain Llama; without AttnRes it is the standard-residual twin; and
    Transformers leaves out a tied head, which is its default."""
    assert resolve(golden(use_attn_gate=False)).family == "llama"
    twin = resolve(golden(use_attn_res=False))
    assert twin.spec is None and twin.family == "gated_llama"
    assert resolve(golden(tie_word_embeddings=MISSING)) == resolve(golden())


@pytest.mark.parametrize(
    ("layers", "block_size", "parameters"),
    [(16, 4, 62_244_352), (16, None, 62_210_560), (32, 8, 116_295_168), (32, None, 116_228_608)],
)
def test_number_of_parameters(layers: int, block_size: int | None, parameters: int) -> None:
    """The published models' sizes, as their index counts them (docs/models.json in
    YpLarryWang/attnres4babylm2026)."""
    sizes = {"n_layer": layers, "n_embd": 512, "n_head": 8, "vocab_size": 16000, "block_size": 512}
    sizes |= {"swiglu_mult": 8 / 3, "attn_res_block_size": block_size or 2}
    parsed = resolve(golden(use_attn_res=block_size is not None, **sizes))
    shapes = FAMILIES[parsed.family].shapes(parsed.config)
    result = sum(math.prod(shape) for shape in shapes.values())
    if parsed.spec:
        result += 512 * len(expected_parts(parsed.spec))
    assert result == parameters


@pytest.mark.parametrize(
    "changes",
    [
        # Of twelve sublayers: the class itself wants an even size that divides them.
        *({"attn_res_block_size": size} for size in (1, 3, 5, 0, -2, 8, 24, True, "4", 4.0, None)),
        {"use_rmsnorm": False},
        {"use_swiglu": False},
        {"use_rope": False},
        {"bidirectional": True},
        {"use_static_attn_res": True},
        {"rope_theta": MISSING},
        {"use_attn_gate": MISSING},
        {"use_attn_res": 1},
        {"tie_word_embeddings": None},
        {"layer_norm_epsilon": float("nan")},
        {"rope_theta": -1.0},
        {"swiglu_mult": 1e300},
        {"swiglu_mult": 0.25},
        {"n_layer": 0},
        pytest.param({"n_embd": 10**400}, id="n_embd beyond floats"),
        {"block_size": "512"},
        {"n_head": 3},
        {"n_head": 64},
        {"hidden_size": 128},
        {"max_position_embeddings": 99},
        {"n_kv_head": 1},
        {"attention_normalizer": "relu2max"},
        {"quantization_config": {"bits": 8}},
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any], sentence: Sentence) -> None:
    """Other models of the family, values that are not stated or not possible, unknown settings."""
    sentence.raises(CheckpointError, resolve, golden(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64, "num_attention_heads": 2},
        {"use_qk_norm": False, "rope_scaling": None},
        {"use_cache": True, "initializer_range": 0.02},
    ],
    ids=repr,
)
def test_harmless_settings(changes: dict[str, Any]) -> None:
    """The same value by its other name, and what is switched off."""
    assert resolve(golden(**changes)) == resolve(golden())


def test_other_repositories_of_that_name_are_none_of_ours(sentence: Sentence) -> None:
    """`nanogpt` is a name that anyone may use: the keys decide, too."""
    foreign = {"model_type": "nanogpt", "architectures": ["NanoGPTForCausalLM"], "n_embd": 64}
    assert resolve(foreign) is None
    other = {"model_type": "gpt2", "attn_res_block_size": MISSING, "use_attn_res": MISSING}
    assert resolve(golden(**other)) is None
    for changes in ({"model_type": "gpt2"}, {"architectures": ["NanoGPTForMaskedLM"]}):
        sentence.raises(CheckpointError, resolve, golden(**changes))


# --- tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden, to be damaged."""
    return Path(shutil.copytree(GOLDENS / BLOCK, tmp_path / "checkpoint"))


LAYER = "transformer.h.2."


@pytest.mark.parametrize(
    "changes",
    [
        {f"{LAYER}attn.attn_gate.weight": None},
        {f"{LAYER}attn.c_attn.weight": None},
        {f"{LAYER}attn.attn_gate.weight": (2, 64)},
        {f"{LAYER}attn.c_attn.weight": (190, 64)},
        {f"{LAYER}attn.c_attn.weight": (64, 192)},
        {f"{LAYER}attn.c_attn.weight": (192, 32)},
        {f"{LAYER}attn_res_q1": (4,)},  # as in static routing
        {f"{LAYER}attn.c_attn.bias": (192,)},
        {"model.embed_tokens.weight": (320, 64)},
        {"model.layers.2.self_attn.v_proj.weight": (64, 64)},
    ],
    ids=str,
)
def test_tensors_that_are_refused(changes: dict, folder: Path, sentence: Sentence) -> None:
    """Missing, misshapen, left over, or there twice."""

    def change(tensors: dict) -> None:
        for name, shape in changes.items():
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = torch.zeros(shape)

    edit(folder, change)
    sentence.raises(CheckpointError, checked.check_folder, folder)


# --- what is served


@pytest.mark.engine
@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [pytest.param(BLOCK, "single_pass", marks=pytest.mark.exhaustive), (SMALL, "two_phase")],
)
def test_goldens_served(name: str, algorithm: str, tmp_path: Path) -> None:
    asked = [case["prompt"] for case in expected(GOLDENS / name)]
    (result,) = run_engine([engine_job(GOLDENS / name, asked, algorithm)], tmp_path)["results"]
    check_job(result, expected(GOLDENS / name))
    check_executed(result, algorithm, compiled=False)
