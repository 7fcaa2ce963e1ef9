"""What formats share whose config.json is that of a Hugging Face base family with keys added."""

import re
from collections.abc import Collection
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.unsupported import variant
from attnres_serve.spec import is_count

_OWN_KEY = re.compile(r"attn_?res(_|$)|attn_?residual")


def base_config(config: dict[str, Any], base: str, known: Collection[str]) -> dict[str, Any]:
    """The base family's config.json, without the AttnRes keys ``known`` to the format.

    Raises:
        CheckpointError: another AttnRes key is set, or the base family would be served wrongly.
    """
    for key, value in config.items():
        if _OWN_KEY.search(key) and key not in known and value not in (None, False):
            raise CheckpointError(
                f"config.json has {key}: {value!r}{variant(f'{key} {value}')}, which is not "
                "supported; the model was trained with another function than the one that would be "
                "served."
            )
    for key in ("hidden_size", "num_hidden_layers"):
        if not is_count(config.get(key)):
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; expected a whole number of at least 1."
            )
    _check_windows(base, config)
    return {key: value for key, value in config.items() if key not in {*known, "auto_map"}}


def refuse_windows(config: dict[str, Any]) -> None:
    """Raise CheckpointError for any sliding window, in formats whose own code ignores it."""
    if config.get("use_sliding_window") or "sliding_attention" in _layer_types(config):
        raise CheckpointError(
            f"use_sliding_window is {config.get('use_sliding_window')!r} and layer_types is "
            f"{config.get('layer_types')!r}; sliding windows are not supported in this format, "
            "whose own code does not apply them to every attention backend."
        )


def _check_windows(base: str, config: dict[str, Any]) -> None:
    """Refuse what vLLM's decoder would serve with other windows than Hugging Face's class has."""
    window, types = config.get("sliding_window"), set(_layer_types(config))
    if FAMILIES[base].hf == "llama":
        right = window is None or bool(types)
    elif window is not None and config.get("use_sliding_window"):
        right = types == {"sliding_attention"}
    else:
        right = types <= {"full_attention"}
    if not right:
        raise CheckpointError(
            f"sliding_window {window!r} with use_sliding_window "
            f"{config.get('use_sliding_window')!r} and layer_types {sorted(types)} is "
            f"not supported on {base}: vLLM would give its layers other windows; supported are no "
            "window, or sliding_attention stated in layer_types for every layer."
        )


def _layer_types(config: dict[str, Any]) -> list[str]:
    """The kind of attention of each layer, empty where none is stated."""
    stated = config.get("layer_types")
    if stated is None:
        return []
    if isinstance(stated, list) and all(isinstance(kind, str) for kind in stated):
        return stated
    raise CheckpointError(f"layer_types is {stated!r}; expected a list of names, or none.")
