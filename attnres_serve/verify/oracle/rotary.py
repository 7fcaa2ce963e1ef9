"""Rotary embedding in float64, of every served type.

The types and their parameters are those of Hugging Face's ``rope_parameters`` (in older files
``rope_scaling``): default, linear, llama3 and yarn (arXiv 2309.00071).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Rope = Mapping[str, Any]  # rope_type, rope_theta and the parameters of the type


def rope_of(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding in a config.json of Hugging Face's families.

    Raises:
        ValueError: a type or a parameter is unknown here.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = stated.get("rope_theta", config.get("rope_theta"))
    kind = stated.get("rope_type") or stated.get("type") or "default"
    usual = {"partial_rotary_factor": 1, "beta_fast": 32, "beta_slow": 1}
    if kind == "default":
        usual["factor"] = 1
    rope = {
        name: value
        for name, value in stated.items()
        if name != "type" and value is not None and usual.get(name) != value
    }
    rope |= {"rope_type": kind, "rope_theta": float(10000.0 if theta is None else theta)}
    if set(rope) != {"rope_type", "rope_theta", *_PARAMETERS.get(kind, ("a known type",))}:
        raise ValueError(f"the rotary embedding {dict(stated)} is not supported")
    return rope


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Half-split rotary embedding of x [tokens, heads, head_dim] at positions [tokens]."""
    dim = x.shape[-1]
    angle = positions.double()[:, None, None] * _frequencies(rope, dim)
    first, second = x.split(dim // 2, dim=-1)
    scale = 0.1 * math.log(rope["factor"]) + 1 if _stretches(rope) else 1.0
    cos, sin = (scale * part.to(x.dtype) for part in (angle.cos(), angle.sin()))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _stretches(rope: Rope) -> bool:
    """Whether this is yarn beyond the trained length, which also scales its output."""
    return rope["rope_type"] == "yarn" and bool(rope["factor"] > 1)


def _frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position for each of the ``dim / 2`` pairs."""
    theta = rope["rope_theta"]
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope["rope_type"] == "default":
        return plain
    slow = plain / rope["factor"]
    if rope["rope_type"] == "linear":
        return slow
    trained = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        turns = trained * plain / (2 * math.pi)  # in the trained length
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        low, high = (
            dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (32, 1)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        keep = 1 - ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return keep * plain + (1 - keep) * slow


_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
