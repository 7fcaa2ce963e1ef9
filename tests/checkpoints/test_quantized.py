"""Quantised checkpoints: whole ones are accepted, whatever the method; others refused by name.

Judged by names, shapes and types; nothing is loaded.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import linear_layers
from checkpoints import GOLDENS, config_of, edit, quantised, write_fla, write_house, write_mode
from on_file import Sentence
from safetensors.torch import load_file
from torch import Tensor

from attnres_serve.checkpoints import checked, quantized
from attnres_serve.errors import CheckpointError
from attnres_serve.families import experts

WEIGHTS = "model.safetensors"
LAYER = "model.layers.1"
Refused = Callable[[Path], object]
Edit = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An INT8 Llama, to be damaged."""
    return quantised(tmp_path / "int8", write_house(tmp_path / "float", block_size=2))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checked.check_folder(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.fixture
def refused(sentence: Sentence) -> Refused:
    return lambda folder: sentence.raises(CheckpointError, checked.check_folder, folder)


@pytest.mark.parametrize(
    "golden",
    [
        *("baseline_attnres", "fla_transformer_block"),
        *("qwen3_attnres_block", "qwen3_attnres_cumulative_full"),
    ],
)
def test_whole_int8_checkpoints(golden: str, tmp_path: Path) -> None:
    """Of any format; the tests below prove something only if they are accepted."""
    folder = quantised(tmp_path / "int8", GOLDENS / golden)
    assert checked.check_folder(folder).parsed is not None


@pytest.mark.parametrize("value", ["int8", ["int8"], 8, True], ids=repr)
def test_a_quantisation_that_is_no_object(value: Any, folder: Path, refused: Refused) -> None:
    edit(folder, quantization_config=value)
    refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.self_attn.q_proj.weight",
        f"{LAYER}.mlp.down_proj.weight",
        f"{LAYER}.self_attn.k_proj.weight_scale",
        f"{LAYER}.mlp.down_proj.weight_scale",
    ],
)
def test_a_missing_tensor(name: str, folder: Path, refused: Refused) -> None:
    """vLLM would serve what memory held: it asks for no tensor of a quantised model."""
    edit(folder, lambda t: [t.pop(result) for result in list(t) if result.startswith(name)])
    refused(folder)


def test_a_missing_bias(tmp_path: Path, refused: Refused) -> None:
    """Qwen2 has one on queries, keys and values, quantised or not."""
    folder = quantised(tmp_path / "int8", write_house(tmp_path / "float", "qwen2", block_size=2))
    edit(folder, lambda t: t.pop(f"{LAYER}.self_attn.k_proj.bias"))
    refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.self_attn.o_proj.bias",  # vLLM would leave it out without a word
        "lm_head.bias",
        f"{LAYER}.input_layernorm.bias",
        f"{LAYER}.mlp.gate_up_proj.weight",
        "model.layers.3.mlp.up_proj.weight_scale",
        "model.layers.3.self_attn.k_scale",
        "unknown.weight",
        "weight_scale",
    ],
)
@pytest.mark.parametrize("value", [0.0, 5.0])
def test_a_left_over_tensor(name: str, value: float, folder: Path, refused: Refused) -> None:
    edit(folder, lambda t: t.update({name: torch.full((64,), value)}))
    refused(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("self_attn.o_proj.weight", lambda t: t.float()),
        ("self_attn.o_proj.weight", lambda t: t[:32]),
        ("self_attn.o_proj.weight_scale", lambda t: torch.cat([t, t])),
        ("self_attn.o_proj.weight_scale", lambda t: t[None]),
        ("mlp.up_proj.weight_scale", lambda t: t.to(torch.float8_e4m3fn)),
        ("input_layernorm.weight", lambda t: t[:32]),
        ("input_layernorm.weight", lambda t: t.to(torch.int8)),
        ("mlp_res_proj.weight", lambda t: t.to(torch.int8)),
        ("mlp_res_norm.weight", lambda t: t.to(torch.int8)),
        # Of queries, keys and values, for all of which vLLM would take one part's scales.
        ("self_attn.k_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
    ],
)
def test_a_tensor_that_does_not_fit(
    name: str, change: Callable[[Tensor], Tensor], folder: Path, refused: Refused
) -> None:
    """vLLM would cut it, or cast it."""
    name = f"{LAYER}.{name}"
    edit(folder, lambda t: t.update({name: change(t[name]).clone()}))
    refused(folder)


def test_parts_of_one_layer_that_are_quantised_differently(folder: Path, refused: Refused) -> None:
    """vLLM would take one part's scales for all."""
    name = f"{LAYER}.self_attn.k_proj.weight"
    edit(folder, lambda t: t.update({name: t[name] * t.pop(f"{name}_scale")}))
    refused(folder)


# --- experts and latent attention

EXPERT = f"{LAYER}.mlp.experts.3"


def family_of(tmp_path: Path, name: str) -> Path:
    """An INT8 model of a family, its experts too."""
    source = write_house(tmp_path / "float", name, layers=2, block_size=2)
    layers = linear_layers(load_file(source / WEIGHTS), without="shared_expert_gate")
    return quantised(tmp_path / "int8", source, layers=layers)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral", "gemma2"])
def test_whole_int8_checkpoints_of_families(name: str, tmp_path: Path) -> None:
    stored = checked.check_folder(family_of(tmp_path, name)).index.stored
    expert = quantized.first_quantised(stored, experts.ONE_EXPERT)
    assert (expert is None) == (name == "gemma2")


def floats(*stems: str) -> Edit:
    """Gives linear layers back the floats that they stand for."""

    def change(tensors: dict[str, Tensor]) -> None:
        for stem in stems:
            scale = tensors.pop(f"{stem}.weight_scale")
            tensors[f"{stem}.weight"] = tensors[f"{stem}.weight"] * scale

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe", lambda t: t.pop(f"{EXPERT}.down_proj.weight_scale")),
        ("qwen3_moe", lambda t: t.pop(f"{EXPERT}.up_proj.weight")),
        ("qwen3_moe", lambda t: t.update({f"{EXPERT}.up_proj.bias": torch.zeros(64)})),
        ("qwen3_moe", floats(f"{EXPERT}.up_proj")),
        ("qwen3_moe", floats(*(f"{EXPERT}.{part}_proj" for part in ("gate", "up", "down")))),
        ("qwen3_moe", floats(f"{EXPERT}.down_proj")),
        ("deepseek_v3", floats(f"{LAYER}.self_attn.kv_a_proj_with_mqa")),
    ],
)
def test_a_mixture_or_latent_attention_that_is_not_whole(
    name: str, change: Edit, tmp_path: Path, refused: Refused
) -> None:
    """vLLM would take one expert's scales for all, or what memory held."""
    refused(edit(family_of(tmp_path, name), change))


def test_experts_alone_may_stay_as_they_are(tmp_path: Path) -> None:
    source = write_house(tmp_path / "float", "qwen3_moe", layers=2, block_size=2)
    layers = linear_layers(load_file(source / WEIGHTS), without=r"\.experts\.")
    folder = quantised(tmp_path / "int8", source, ["re:.*[.]experts[.].*"], layers)
    stored = checked.check_folder(folder).index.stored
    assert quantized.first_quantised(stored, experts.ONE_EXPERT) is None


def test_two_weights_of_a_layer(folder: Path, refused: Refused) -> None:
    name = f"{LAYER}.mlp.down_proj.qweight"
    edit(folder, lambda t: t.update({name: torch.zeros(12, 64, dtype=torch.int32)}))
    refused(folder)


# --- other methods, by what they store


def packed(method: str) -> dict[str, Callable[[int, int], Tensor]]:
    """What a method stores below a layer of (rows, columns), of 4 bits and groups of 32."""
    ints, halves = {"dtype": torch.int32}, {"dtype": torch.float16}
    group = {"scales": lambda out, into: torch.ones(into // 32, out, **halves)}
    group["qzeros"] = lambda out, into: torch.ones(into // 32, out // 8, **ints)
    return {
        "gptq": group
        | {
            "qweight": lambda out, into: torch.ones(into // 8, out, **ints),
            "g_idx": lambda out, into: torch.zeros(into, **ints),
        },
        "awq": group | {"qweight": lambda out, into: torch.ones(into, out // 8, **ints)},
        "compressed-tensors": {
            "weight_packed": lambda out, into: torch.ones(out, into // 8, **ints),
            "weight_scale": lambda out, into: torch.ones(out, into // 32, **halves),
            "weight_shape": lambda out, into: torch.tensor([out, into]),
        },
        "fp8": {
            "weight": lambda out, into: torch.ones(out, into).to(torch.float8_e4m3fn),
            "weight_scale": lambda out, into: torch.ones(()),
            "input_scale": lambda out, into: torch.ones(1),
        },
        "fp8 blocks": {
            "weight": lambda out, into: torch.ones(out, into).to(torch.float8_e4m3fn),
            "weight_scale_inv": lambda out, into: torch.ones(-(-out // 128), -(-into // 128)),
        },
    }[method]


METHODS = ["gptq", "awq", "compressed-tensors", "fp8", "fp8 blocks"]


def write_packed(folder: Path, method: str, source: Path) -> Path:
    shutil.copytree(source, folder)

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj." in name and "res_proj" not in name]:
            shape, stem = tensors.pop(name).shape, name.removesuffix("weight")
            tensors |= {stem + leaf: make(*shape) for leaf, make in packed(method).items()}

    return edit(folder, pack, quantization_config={"quant_method": method.split()[0], "bits": 4})


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_pack_otherwise(method: str, tmp_path: Path) -> None:
    """Whole they are accepted, without their scales, or without the weight, refused."""
    whole = write_packed(tmp_path / "packed", method, write_house(tmp_path / "float", block_size=2))
    assert checked.check_folder(whole).parsed is not None
    scales = {"weight_scale", "weight_scale_inv", "scales", "qzeros"} & set(packed(method))
    weights = {"weight", "weight_packed", "qweight"} & set(packed(method))
    for leaf in scales | weights:
        folder = shutil.copytree(whole, tmp_path / leaf)
        edit(folder, lambda t, leaf=leaf: t.pop(f"{LAYER}.mlp.down_proj.{leaf}"))
        assert f"{LAYER}.mlp.down_proj" in refusal(folder)
    larger = {weight for weight in weights | scales if packed(method)[weight](64, 96).numel() > 1}
    for leaf in larger - {"qzeros", "weight_scale_inv"}:
        folder = shutil.copytree(whole, tmp_path / f"larger {leaf}")
        name = f"{LAYER}.mlp.down_proj.{leaf}"
        edit(folder, lambda t, name=name: t.update({name: t[name].repeat(2, 16)}))
        assert "the configuration and the weights do not belong together" in refusal(folder)


def test_scales_of_a_cache(folder: Path) -> None:
    """Of an 8-bit KV cache: they say nothing about the weights."""
    assert checked.check_folder(folder).parsed is not None
    names = ("self_attn.k_scale", "self_attn.attn.v_scale", "self_attn.k_proj.output_scale")
    edit(folder, lambda t: t.update({f"{LAYER}.{name}": torch.ones(1) for name in names}))
    assert checked.check_folder(folder).parsed is not None


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_biases_that_gptq_writes(value: float, tmp_path: Path, refused: Refused) -> None:
    """Its exporters write zeros where a layer has none; what is not zero would be left out."""
    source = write_house(tmp_path / "float", block_size=2)
    folder = write_packed(tmp_path / "packed", "gptq", source)
    name = f"{LAYER}.self_attn.o_proj.bias"
    edit(folder, lambda t: t.update({name: torch.full((64,), value)}))
    if value:
        refused(folder)
    else:
        assert checked.check_folder(folder).parsed is not None


# --- names inside a quantisation


ATTENTION = "model.layers.{}.attn.{}_proj"


def fla_of(tmp_path: Path, **changes: Any) -> Path:
    folder = quantised(tmp_path / "int8", write_fla(tmp_path / "float"))
    return edit(folder, quantization_config=config_of(folder)["quantization_config"] | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore": ["lm_head", ATTENTION.format(0, "q")]},
        {"ignore": ["re:.*[.]attn[.].*"]},
        {"ignore": ["re:.*self_attn.*"]},
        {"config_groups": {"g": {"targets": [ATTENTION.format(1, "o")]}}},
        {"modules_to_not_convert": ["layers.0.attn"]},
        {"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj"]]},
        {"ignored_layers": [ATTENTION.format(2, "v")]},
        {"exclude": ["*.attn.*"]},
        {"dynamic": {"-:.*[.]attn[.].*": {}}},
        {"block_name_to_quantize": "model.layers.0.attn"},
    ],
    ids=str,
)
def test_entries_that_fit_one_name_only(
    changes: dict[str, Any], tmp_path: Path, refused: Refused
) -> None:
    """FLA's attention is attn, vLLM's self_attn: an ignored layer would be quantised, or back."""
    refused(fla_of(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore": ["lm_head"]},
        {"ignore": ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.attn_res_proj"]},
        {"ignore": ["re:.*lm_head", "re:.*mlp.*", "re:.*attn[.]q_proj"]},
        {"modules_in_block_to_quantize": [["attn.k_proj"]], "modules_to_not_convert": ["q_proj"]},
        {"ignore": ["re:("]},
    ],
    ids=str,
)
def test_entries_that_fit_both_names(changes: dict[str, Any], tmp_path: Path) -> None:
    assert checked.check_folder(fla_of(tmp_path, **changes)).parsed is not None


def test_entries_where_only_sites_are_renamed(tmp_path: Path) -> None:
    """Of open-attnres' names only AttnRes' own are not vLLM's, and those are not quantised."""
    ignored = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    source = write_mode(tmp_path / "float", cumulative=True)
    folder = quantised(tmp_path / "int8", source, ignore=ignored)
    assert checked.check_folder(folder).parsed is not None
