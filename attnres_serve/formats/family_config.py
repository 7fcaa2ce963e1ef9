"""Shared code of formats whose config.json is that of a Hugging Face family with added keys."""

import re
from collections.abc import Collection
from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.checks import check_windows
from attnres_serve.families.family import Family
from attnres_serve.formats.keys import TRAINING_KEYS, refuse_unknown
from attnres_serve.formats.refused import variant

_OWN_KEY = re.compile(r"attn_?res(_|$)|attn_?residual")
# Keys of every family.  Otherwise only those that the family's Hugging Face class reads are kept:
# vLLM's code for a family also reads keys of other families, which that class ignores.
_FIRST = ("architectures", "model_type")
_LAST = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    *TRAINING_KEYS,
)


def family_config(
    config: dict[str, Any], family_name: str, known: Collection[str], strictly: bool = False
) -> dict[str, Any]:
    """The family's config.json, without the AttnRes keys ``known`` to the format.

    ``keys.refuse_unknown`` checks the keys that the family does not read.

    Raises:
        CheckpointError: another AttnRes key is set, or one that the family does not have and
            that changes other models, or the family would be served wrongly.
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
    family = FAMILIES[family_name]
    eps = family.epsilon(config)
    if not is_number(eps) or eps <= 0:
        raise CheckpointError(f"{family.eps} is {eps!r}; expected a positive number.")
    kept_keys = tuple(dict.fromkeys((*_FIRST, *family.keys(), *_LAST)))
    refuse_unknown(config, {*known, *kept_keys}, f"a {family_name} model", strictly)
    check_windows(family, config)
    return _by_one_name(family, {key: config[key] for key in kept_keys if key in config})


def _by_one_name(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with vLLM's names of keys."""
    named: dict[str, Any] = {}
    for key, value in config.items():
        name = family.other_names.get(key, key)
        if named.setdefault(name, value) != value:
            keys = [key for key in sorted(config) if family.other_names.get(key, key) == name]
            values = " and ".join(f"{key} is {config[key]!r}" for key in keys)
            raise CheckpointError(f"{values}, which are two names of one value; remove one.")
    return named


def refuse_windows(config: dict[str, Any]) -> None:
    """Raise CheckpointError for any sliding window, in formats whose training code ignores it."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise CheckpointError(
            f"use_sliding_window is {config.get('use_sliding_window')!r} and layer_types is "
            f"{config.get('layer_types')!r}; sliding windows are not supported in this format, "
            "whose own code does not apply them to every attention backend."
        )
