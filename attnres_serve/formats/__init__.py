"""Checkpoint formats, one module each.

A format module has:

* ``NAME`` - how the format is called in logs and in ``GET /v1/attn_res``;
* ``claims(config)`` - whether a config.json is of this format, decided by model_type,
  architectures and keys together, never by one key alone;
* ``translate(config)`` - the base family, its Hugging Face config and the AttnRes specification;
* ``rename(name)`` - a tensor's name in the house format (the base family's names plus Kimi's);
* where it fuses weights, ``parts(name)`` - names, for ``rename``, of the equal parts that a tensor
  holds one after the other along dimension 0; the name itself for one that is not fused.

Formats that claim the same config.json also have ``MARK``, a pattern of tensor names that only one
of them has, and ``KEY``, a key of config.json that only one of them writes.
"""

from attnres_serve.formats import (
    delta_attnres,
    fla,
    house,
    nanogpt,
    open_attnres,
    qwen3_ar,
    torchtitan,
)

SERVED = (house, fla, qwen3_ar, open_attnres, delta_attnres, torchtitan, nanogpt)
SUPPORTED = (
    f"supported are the formats {', '.join(module.NAME for module in SERVED)}, described in "
    "docs/formats.md"
)


def by_name(name: str):
    """The format module called ``name``."""
    return next(module for module in SERVED if name == module.NAME)
