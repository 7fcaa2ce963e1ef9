"""Random checkpoints of Hugging Face's classes, and of the house format on them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints.hugging_face import by_names
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Site, hugging_face


def write_plain(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """A checkpoint in float32 with Hugging Face's names. Returns its folder."""
    own = hugging_face.config(config["model_type"], config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some classes draw the constants of their recurrences
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = _random(name, parameter.data, draw)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(by_names(config, load_file(file)), file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def _random(name: str, usual: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(usual.shape, generator=draw)
    if usual.dim() == 1:  # norms, biases and the constants of recurrences stay near the usual
        return 0.8 * usual + 0.2 * noise
    if "embed" in name:
        return noise
    return 1.1 * noise / math.sqrt(usual.shape[-1])


def write_rewritten(
    folder: Path, sites: Sequence[Site], attn_res: Mapping[str, Any], seed: int = 0, scale=1.0
) -> Path:
    """Make a plain checkpoint one of the house format, with random queries times ``scale``."""
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    names = oracle.depth_names(*{site.kind for site in sites})
    spec = oracle.Spec(names, layout, {}, hidden, config["vocab_size"], 1e-6, tied=False)
    oracle.add_depth(spec, dict(attn_res))
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, shape in oracle.depth_shapes(spec).items():
        noise = torch.randn(shape, generator=draw)
        if name.endswith("_norm.weight"):
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = scale * noise * (0.3 if shape else 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["model_type"] = f"attnres_{config['model_type']}"
    (folder / "config.json").write_text(json.dumps(config | {"attn_res": dict(attn_res)}))
    return folder
