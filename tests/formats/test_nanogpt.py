"""BabyLM's nanoGPT: config.json, tensors, the oracle, and what is served."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, edit
from goldens import check_executed, check_job, expected
from jobs import engine_job, run_engine

from attnres_serve.checkpoints import checked
from attnres_serve.checkpoints.names import expected_parts
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.resolve import resolve

BLOCK, SMALL = "nanogpt_block", "nanogpt_bias_small_scale"
WEIGHTS = "model.safetensors"
MISSING = object()


def golden(name: str = BLOCK, **changes: Any) -> dict[str, Any]:
    config = json.loads((GOLDENS / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not MISSING}


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
    parsed = resolve(
        golden(
            n_layer=layers,
            n_embd=512,
            n_head=8,
            vocab_size=16000,
            block_size=512,
            swiglu_mult=8 / 3,
            use_attn_res=block_size is not None,
            attn_res_block_size=block_size or 2,
        )
    )
    shapes = FAMILIES[parsed.family].shapes(parsed.config)
    result = sum(math.prod(shape) for shape in shapes.values())
    if parsed.spec:
        result += 512 * len(expected_parts(parsed.spec))
    assert result == parameters


@pytest.mark.parametrize("size", [1, 3, 5, 0, -2, 8, 24, True, "4", 4.0, None], ids=repr)
def test_block_sizes_that_are_refused(size: Any) -> None:
    """Twelve sublayers: the class itself wants an even size that divides them."""
    with pytest.raises(CheckpointError) as caught:
        resolve(golden(attn_res_block_size=size))
    sentence = str(caught.value)
    assert f"attn_res_block_size is {size!r}" in sentence and "divides all 12" in sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_rmsnorm": False}, "use_rmsnorm is False (LayerNorm"),
        ({"use_swiglu": False}, "use_swiglu is False (a GELU MLP)"),
        ({"use_rope": False}, "use_rope is False (learned positions)"),
        ({"bidirectional": True}, "bidirectional is True (attention to later tokens)"),
        ({"use_static_attn_res": True}, "use_static_attn_res is True (static routing"),
        ({"rope_theta": MISSING}, "rope_theta is None; config.json must state it"),
        ({"use_attn_gate": MISSING}, "use_attn_gate is None; config.json must state it"),
        ({"use_attn_res": 1}, "use_attn_res is 1;"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None;"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan;"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0;"),
        ({"swiglu_mult": 1e300}, "swiglu_mult is 1e+300;"),
        ({"swiglu_mult": 0.25}, "make an MLP of size 0"),
        ({"n_layer": 0}, "n_layer is 0;"),
        ({"n_embd": 10**400}, "a whole number from 1 to 2^31 - 1"),
        ({"block_size": "512"}, "block_size is '512';"),
        ({"n_head": 3}, "n_embd 64 is not n_head 3 times an even number"),
        ({"n_head": 64}, "n_embd 64 is not n_head 64 times an even number"),
        ({"hidden_size": 128}, "n_embd: 64 and hidden_size: 128, which are two names"),
        ({"max_position_embeddings": 99}, "block_size: 256 and max_position_embeddings: 99"),
        ({"n_kv_head": 1}, "has n_kv_head: 1,"),
        ({"attention_normalizer": "relu2max"}, "has attention_normalizer: 'relu2max',"),
        ({"quantization_config": {"bits": 8}}, "has quantization_config: {'bits': 8},"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configs_that_are_refused(changes: dict[str, Any], sentence: str) -> None:
    """Other models of the family, values that are not stated or not possible, unknown settings."""
    with pytest.raises(CheckpointError) as caught:
        resolve(golden(**changes))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


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


def test_other_repositories_of_that_name_are_none_of_ours() -> None:
    """`nanogpt` is a name that anyone may use: the keys decide, too."""
    foreign = {"model_type": "nanogpt", "architectures": ["NanoGPTForCausalLM"], "n_embd": 64}
    assert resolve(foreign) is None
    other = {"model_type": "gpt2", "attn_res_block_size": MISSING, "use_attn_res": MISSING}
    assert resolve(golden(**other)) is None
    for changes in ({"model_type": "gpt2"}, {"architectures": ["NanoGPTForMaskedLM"]}):
        with pytest.raises(CheckpointError, match=r"attn_res_block_size: 4 .* ambiguous"):
            resolve(golden(**changes))


# --- tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden, to be damaged."""
    return Path(shutil.copytree(GOLDENS / BLOCK, tmp_path / "checkpoint"))


LAYER = "transformer.h.2."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{LAYER}attn.attn_gate.weight": None}, "lacks the tensor model.layers.2.self_attn.attn"),
        ({f"{LAYER}attn.c_attn.weight": None}, "lacks the tensor model.layers.2.self_attn.q_proj"),
        ({f"{LAYER}attn.attn_gate.weight": (2, 64)}, "[2, 64], but config.json makes it [64, 64]"),
        ({f"{LAYER}attn.c_attn.weight": (190, 64)}, "[190, 64]; it should hold 3 parts of equal"),
        ({f"{LAYER}attn.c_attn.weight": (64, 192)}, "it should hold 3 parts"),
        ({f"{LAYER}attn.c_attn.weight": (192, 32)}, "[64, 32], but config.json makes it [64, 64]"),
        ({f"{LAYER}attn_res_q1": (4,)}, "[4]; expected [1, 64]"),  # as in static routing
        ({f"{LAYER}attn.c_attn.bias": (192,)}, "attn.c_attn.q.bias, which a gated_llama"),
        ({"model.embed_tokens.weight": (320, 64)}, "transformer.wte.weight, two names of one"),
        ({"model.layers.2.self_attn.v_proj.weight": (64, 64)}, "two names of one weight"),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_tensors_that_are_refused(changes: dict, sentence: str, folder: Path) -> None:
    """Missing, misshapen, left over, or there twice."""

    def change(tensors: dict) -> None:
        for name, shape in changes.items():
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = torch.zeros(shape)

    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        checked.check_folder(folder)
    assert sentence in str(caught.value)


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
