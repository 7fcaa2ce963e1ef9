"""Kimi Linear's own format, and Kimi K3's: what is claimed, what a key counts, what is refused."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import tiny_sites
import torch
from checkpoints import edit
from checkpoints.kimi import Wrap, in_a_whole_model, write_with_more
from facts import TINY
from facts.kimi_linear import KIMI_LAYERS
from goldens import expected
from on_file import Sentence
from serving import FAMILY_GOLDENS
from torch import Tensor

from attnres_serve.checkpoints.check import describe, render
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.resolve import resolve

CONFIG = TINY["kimi_linear"] | {"attn_res_block_size": 2}
LINEAR = KIMI_LAYERS["linear_attn_config"]
GOLDEN = FAMILY_GOLDENS / "kimi_k3"
# As in config.json of Kimi-Linear-48B-A3B, and the paper's variant: blocks of three layers.
FULL = [*range(4, 27, 4), 27]
RELEASED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "attn_res_block_size": 3,
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def off(folder: Path, case: dict[str, Any]) -> float:
    """How far the float64 model of a checkpoint is from what a golden expects."""
    ids = [*case["prompt"], *case["output"]]
    result = tiny_sites.load(folder).logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    wanted = [*case["prompt_logprobs"][1:], *case["output_logprobs"]]
    return float((result.flatten() - torch.tensor(wanted, dtype=torch.float64)).abs().max())


def test_the_papers_variant() -> None:
    """Nine blocks of six sublayers, and the embedding; the context by the name that vLLM reads."""
    result = resolve(RELEASED)
    assert (result.format, result.family) == ("kimi_linear", "kimi_linear")
    assert result.spec.block_starts == tuple(range(0, 54, 6))
    assert result.spec.key_norm_eps == 1e-5 and result.spec.final_mix
    assert result.config["max_position_embeddings"] == 1048576
    assert "model_max_length" not in result.config


def test_the_key_counts_layers() -> None:
    assert resolve(CONFIG | {"attn_res_block_size": 3}).spec.block_starts == (0, 6)


@pytest.mark.parametrize(
    "changes", [{"attn_res_block_size": None}, {"architectures": ["AnotherForCausalLM"]}], ids=str
)
def test_others_are_left_to_vllm(changes: dict[str, Any]) -> None:
    assert resolve(CONFIG | changes) is None


def test_two_names_of_one_value(sentence: Sentence) -> None:
    """Those of Hugging Face's class are read where they say the same."""
    same = {"model_max_length": 2048, "n_group": 1, "num_experts_per_tok": 2}
    result = resolve(CONFIG | same)
    assert result is not None and not {*same} & {*result.config}
    sentence.raises(CheckpointError, resolve, CONFIG | {"num_experts_per_tok": 3})


@pytest.mark.parametrize(
    "sizes", [(1024, 12, None), (7168, 96, None), (60, 4, None), (64, 4, 15)], ids=str
)
def test_heads_of_an_odd_size_are_not_rotated(sizes: tuple[int, int, int | None]) -> None:
    """Hidden size by heads says nothing of latent attention: Kimi K3's is no whole number."""
    hidden, heads, head = sizes
    counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
    result = resolve(CONFIG | counts | {"hidden_size": hidden, "head_dim": head})
    assert result is not None and result.spec is not None


@pytest.mark.parametrize(
    "changes",
    [
        *({"attn_res_block_size": odd} for odd in (0, -1, 2.0, True, "2", [2])),
        {"hidden_act": "situ"},
        {"linear_attn_config": LINEAR | {"gate_lower_bound": -6.0}},
        {"linear_attn_config": LINEAR | {"gated": True}},
        {"mla_use_nope": None},
        {"kda_decay_groups": 4},
        {"mixer": "mamba2"},
        {"pre_norm_only": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("wrap", [lambda text: text, in_a_whole_model], ids=["flat", "whole"])
def test_what_is_not_served(changes: dict[str, Any], wrap: Wrap, sentence: Sentence) -> None:
    sentence.raises(CheckpointError, resolve, wrap(CONFIG | changes))


def test_a_whole_model_is_its_text() -> None:
    """Keys of both are read in either place; those of images and of generation change nothing."""
    whole = in_a_whole_model(without(CONFIG, "dtype", "eos_token_id", "architectures"))
    stated = {"dtype": CONFIG["dtype"], "eos_token_id": CONFIG["eos_token_id"], "temperature": 0.6}
    assert resolve(whole | stated | {"media_placeholder_token_id": 5}) == resolve(CONFIG)
    one = whole | {"architectures": whole["architectures"][0]}
    assert resolve(one | stated) == resolve(CONFIG)


@pytest.mark.parametrize(
    "changes",
    [
        {"depth_gate": 2},
        pytest.param({"text_config": CONFIG | {"model_type": "llama"}}, id="another text"),
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_what_a_whole_model_cannot_say(changes: dict[str, Any], sentence: Sentence) -> None:
    sentence.raises(CheckpointError, resolve, in_a_whole_model(CONFIG) | changes)


def test_a_whole_model_with_standard_residuals_is_left_to_vllm() -> None:
    assert resolve(in_a_whole_model(without(CONFIG, "attn_res_block_size"))) is None


@pytest.mark.parametrize("wrap", [lambda text: text, in_a_whole_model], ids=["flat", "whole"])
@pytest.mark.parametrize("prefix", ["", "language_model."], ids=["bare", "prefixed"])
def test_names_and_what_is_left_aside(wrap: Wrap, prefix: str, tmp_path: Path) -> None:
    """Layers that predict further tokens, and what reads images, by which nothing else changes."""
    write_with_more(tmp_path / "more", GOLDEN, wrap, prefix)
    actual = describe(check_folder(tmp_path / "more"))
    assert actual == describe(check_folder(GOLDEN)) | {"left_aside": 2, "images": 3}
    (case, *_) = expected(GOLDEN)
    assert off(tmp_path / "more", case) < 1e-12
    convert(str(tmp_path / "more"), str(tmp_path / "house"), to_house=True)
    assert describe(check_folder(tmp_path / "house"))["images"] == 0
    assert off(tmp_path / "house", case) < 1e-12
    assert "no images     3 tensors" in render(actual)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("A_log", lambda tensor: torch.cat([tensor, tensor.new_zeros(6)])),
        ("A_log", lambda tensor: tensor.view(1, 1, -1, 1)),
        ("k_conv1d.weight", lambda tensor: tensor.flatten(1)),
    ],
    ids=["padded", "old", "flat"],
)
def test_other_forms_of_a_tensor_are_refused_by_its_name(
    part: str, change: Callable[[Tensor], Tensor], tmp_path: Path, sentence: Sentence
) -> None:
    folder, name = copytree(GOLDEN, tmp_path / "other"), f"model.layers.1.self_attn.{part}"
    edit(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    sentence.raises(CheckpointError, check_folder, folder)


@pytest.mark.parametrize("case", expected(GOLDEN), ids=lambda case: f"{len(case['prompt'])} tokens")
def test_the_float64_model_equals_another_of_the_equations(case: dict[str, Any]) -> None:
    assert off(GOLDEN, case) < 1e-12
