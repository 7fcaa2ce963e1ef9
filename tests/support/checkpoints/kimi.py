"""Checkpoints of Kimi's language models with more than these around them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checkpoints.tensors import write

Wrap = Callable[[dict[str, Any]], dict[str, Any]]  # of a config.json into another


def in_a_whole_model(text: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with this one in it, as Kimi K3's is."""
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }


def write_with_more(
    folder: Path, source: Path, wrap: Wrap = in_a_whole_model, prefix: str = "language_model."
) -> Path:
    """A checkpoint with two tensors that predict further tokens and three that read images."""
    config = json.loads((source / "config.json").read_text())
    behind = f"model.layers.{config['num_hidden_layers']}"
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"{behind}.{part}.weight": torch.zeros(2) for part in ("enorm", "eh_proj")}
    own = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    images = ("vision_tower.patch", "mm_projector.0", "mm_projector.2")
    own |= {f"{name}.weight": torch.zeros(2) for name in images}
    return write(folder, wrap(config | {"num_nextn_predict_layers": 1}), own, "float32")
