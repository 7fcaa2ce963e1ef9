"""What formats share whose config.json is that of a Hugging Face base family with keys added."""

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
# Of every family.  What its own classes read is handed on besides, as vLLM reads it as they do, and
# nothing else: vLLM's code for a family also knows keys of others, which its own class ignores.
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


def base_config(
    config: dict[str, Any], base: str, known: Collection[str], strictly: bool = False
) -> dict[str, Any]:
    """The base family's config.json, without the AttnRes keys ``known`` to the format.

    Keys that the family does not read are looked at as ``keys.refuse_unknown`` does.

    Raises:
        CheckpointError: another AttnRes key is set, or one that the base family does not have and
            that changes other models, or the base family would be served wrongly.
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
    family = FAMILIES[base]
    eps = family.epsilon(config)
    if not is_number(eps) or eps <= 0:
        raise CheckpointError(f"{family.eps} is {eps!r}; expected a positive number.")
    handed_on = tuple(dict.fromkeys((*_FIRST, *family.keys(), *_LAST)))
    refuse_unknown(config, {*known, *handed_on}, f"a {base} model", strictly)
    check_windows(family, config)
    return _by_one_name(family, {key: config[key] for key in handed_on if key in config})


def _by_one_name(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the names of keys that vLLM reads."""
    named: dict[str, Any] = {}
    for key, value in config.items():
        name = family.other_names.get(key, key)
        if named.setdefault(name, value) != value:
            raise CheckpointError(
                f"{key} is {value!r} and {name} {config[name]!r}, which are two names of one value."
            )
    return named


def refuse_windows(config: dict[str, Any]) -> None:
    """Raise CheckpointError for any sliding window, in formats whose own code ignores it."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise CheckpointError(
            f"use_sliding_window is {config.get('use_sliding_window')!r} and layer_types is "
            f"{config.get('layer_types')!r}; sliding windows are not supported in this format, "
            "whose own code does not apply them to every attention backend."
        )
