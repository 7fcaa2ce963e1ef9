"""A checkpoint in float64."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from attnres_serve.verify.oracle.formats import spec_of
from attnres_serve.verify.oracle.model import Model
from attnres_serve.verify.oracle.spec import Spec, site_role


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must have."""
    d, names = spec.hidden, spec.names
    shapes: dict[str, tuple[int, ...]] = {names["embedding"]: (spec.vocab, d)}
    shapes[names["final_norm"]] = (d,)
    if not spec.tied:
        shapes[names["head"]] = (spec.vocab, d)
    for place in spec.layout:
        shapes[names[f"{place.kind}_norm"].format(place.layer)] = (d,)
        for leaf, shape in spec.sublayers[place.kind].shapes(d).items():
            shapes[spec.tensor_name(place, leaf)] = shape
    return shapes | depth_shapes(spec)


def depth_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the sites."""
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.block_starts is None:
        return shapes
    d, names = spec.hidden, spec.names
    for site in range(spec.final + spec.final_mix):
        role, layer = site_role(spec, site)
        query = names[f"{role}_query"].format(layer)
        shapes[query] = (1, d) if query.endswith(".weight") else (d,)
        shapes[names[f"{role}_key"].format(layer)] = (d,)
        if spec.recency_bias:
            shapes[names[f"{role}_recency"].format(layer)] = ()
        if spec.source_bias:
            count = 1 + sum(start < site + spec.cumulative for start in spec.starts)
            shapes[names[f"{role}_recency"].format(layer)] = (count,)
    return shapes


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in float64."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a file handle, not a dict)
                weights[name] = tensors.get_tensor(name).to(torch.float64)
    return weights


def load(checkpoint_dir: str | Path) -> Model:
    """Read config.json and every safetensors file of a checkpoint."""
    folder = Path(checkpoint_dir)
    config = json.loads((folder / "config.json").read_text())
    weights = read_weights(folder)
    spec = spec_of(config, weights)
    if spec.tied:
        weights.pop(spec.names["head"], None)
    for name in spec.unread:
        weights.pop(name, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != (expected := _shapes(spec)):
        odd = sorted(dict(shapes.items() ^ expected.items()))
        raise ValueError(f"missing, unexpected or misshapen tensors: {odd}")
    return Model(spec, weights)
