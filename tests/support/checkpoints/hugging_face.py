"""Ordinary checkpoints of families without a maker of their own, by Hugging Face's class."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from facts import TINY
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from attnres_serve.families import FAMILIES
from checkpoints.tensors import draw, write


def tiny(base: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, with the vocabulary of the tests' tokenizer."""
    config = TINY[base] | {"vocab_size": 320, "max_position_embeddings": 512} | changes
    layers = config["num_hidden_layers"]
    for key in ("layer_types", "no_rope_layers", "hybrid_override_pattern"):
        if config.get(key):
            config[key] = config[key][:layers]
    if layers % config.get("layer_group_size", 1):
        config["layer_group_size"] = layers
    if isinstance(linear := config.get("linear_attn_config"), dict):  # it counts from 1
        config["linear_attn_config"] = {
            key: [layer for layer in value if layer <= layers] if "layers" in key else value
            for key, value in linear.items()
        }
    return config


def saved(config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that Hugging Face's class saves of a model that it begins.

    Zeros where it has none, or none with the gates of Kimi K3.
    """
    if not FAMILIES[config["model_type"]].has_hf_class or "mla_use_output_gate" in config:
        shapes = FAMILIES[config["model_type"]].shapes(config)
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)  # some classes draw the constants of their recurrences
        MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own).save_pretrained(folder)
        return by_names(config, load_file(Path(folder) / "model.safetensors"))


def by_names(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of checkpoints.

    transformers 5.19 saves dense layers of Kimi Linear by a name of its experts.
    """
    if config["model_type"] != "kimi_linear":
        return tensors
    dense = tuple(f"model.layers.{layer}." for layer in range(config["first_k_dense_replace"]))
    return {
        name.replace("block_sparse_moe", "mlp") if name.startswith(dense) else name: tensor
        for name, tensor in tensors.items()
    }


def write_tiny(
    folder: Path, base: str, layers: int, seed: int, scale: float, dtype: str, changes: dict
) -> Path:
    """An ordinary checkpoint of random weights. Returns its folder."""
    config = tiny(base, num_hidden_layers=layers, **changes)
    tensors = {name: _drawn(name, usual, seed, scale) for name, usual in saved(config).items()}
    return write(folder, config, tensors, dtype)


def _drawn(name: str, usual: Tensor, seed: int, scale: float) -> Tensor:
    """As other makers draw; constants of activations and recurrences stay near the usual ones."""
    if usual.dim() > 1 or "norm" in name or name.endswith("bias"):
        return draw(name, tuple(usual.shape), seed, scale, False)
    noise = draw(name, (usual.numel(),), seed, scale, False).reshape(usual.shape)
    return (0.8 * usual.float() + 0.2 * noise).bfloat16().float()
