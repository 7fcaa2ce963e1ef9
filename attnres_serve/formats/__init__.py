"""Checkpoint formats, one module each; ``format.Format`` describes a module."""

from attnres_serve.formats import (
    alice_ai,
    baseline_attnres,
    delta_attnres,
    fla,
    house,
    kimi_linear,
    nanogpt,
    open_attnres,
    qwen3_ar,
    torchtitan,
)
from attnres_serve.formats.format import Format

SERVED: tuple[Format, ...] = (
    house,
    kimi_linear,
    alice_ai,
    fla,
    qwen3_ar,
    open_attnres,
    delta_attnres,
    torchtitan,
    nanogpt,
    baseline_attnres,
)
SUPPORTED = f"supported are the {len(SERVED)} formats of docs/use/formats.md"


def by_name(name: str) -> Format:
    """The format called ``name``."""
    return next(module for module in SERVED if name == module.NAME)


def own_layer_names(name: str) -> str | None:
    """The title of a format whose linear layers have other names than the family's; else None.

    LoRA adapters use the family's names of layers.
    """
    return getattr(by_name(name), "OWN_LAYER_NAMES", None)
