"""Ordinary checkpoints of families without a maker of their own, by Hugging Face's class."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file
from tiny import TINY
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from checkpoints.tensors import draw, write


def tiny(base: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, with the vocabulary of the tests' tokenizer."""
    config = TINY[base] | {"vocab_size": 320, "max_position_embeddings": 512} | changes
    if base == "olmoe":
        config["rms_norm_eps"] = 1e-5
    for key in ("layer_types", "no_rope_layers", "hybrid_override_pattern"):
        if config.get(key):
            config[key] = config[key][: config["num_hidden_layers"]]
    return config


def saved(config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that Hugging Face's class saves of a model that it begins."""
    own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with TemporaryDirectory() as folder:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


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
