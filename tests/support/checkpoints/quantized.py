"""INT8 copies as saved by compressed-tensors."""

import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnres_serve.compat import source

# Where it is skipped, `check` and the server refuse such checkpoints.
computes_int8 = pytest.mark.skipif(
    source.lacks_int8(), reason="a processor without dot products of 8-bit integers"
)
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def quantised(
    folder: str | Path,
    base: str | Path,
    ignore: Sequence[str] = (),
    layers: Collection[str] | None = None,
) -> Path:
    """A copy with INT8 weights (one scale per row) and INT8 activations, as saved by
    compressed-tensors. Returns its folder.

    `ignore` names linear layers that stay as they are, beside the head; `layers` those that are
    quantised, the usual projections if None.
    """
    folder, tensors = Path(folder), {}
    shutil.copytree(base, folder)
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        is_usual = stem.endswith("_proj") and "res_proj" not in stem and stem not in ignore
        if not (is_usual if layers is None else stem in layers):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {
        "targets": ["Linear"],
        "weights": INT8 | {"strategy": "channel", "dynamic": False},
        "input_activations": INT8 | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float tensors that INT8 ones stand for."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"] if f"{name}_scale" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
