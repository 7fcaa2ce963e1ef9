"""What formats share whose config.json is that of a Hugging Face base family with keys added."""

import re
from collections.abc import Collection
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.keys import TRAINING_KEYS, refuse_unknown
from attnres_serve.formats.unsupported import variant
from attnres_serve.spec import is_count, is_number

_OWN_KEY = re.compile(r"attn_?res(_|$)|attn_?residual")
# What the base families' own classes read; vLLM reads it as they do.  Nothing else is handed on:
# vLLM's code for a family also knows keys of others, which the family's own class ignores.
_HANDED_ON = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    *TRAINING_KEYS,
)


def base_config(config: dict[str, Any], base: str, known: Collection[str]) -> dict[str, Any]:
    """The base family's config.json, without the AttnRes keys ``known`` to the format.

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
    eps = config.get("rms_norm_eps", 1e-6)
    if not is_number(eps) or eps <= 0:
        raise CheckpointError(f"rms_norm_eps is {eps!r}; expected a positive number.")
    refuse_unknown(config, {*known, *_HANDED_ON}, f"a {base} model")
    _check_windows(base, config)
    return {key: config[key] for key in _HANDED_ON if key in config}


def refuse_windows(config: dict[str, Any]) -> None:
    """Raise CheckpointError for any sliding window, in formats whose own code ignores it."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise CheckpointError(
            f"use_sliding_window is {config.get('use_sliding_window')!r} and layer_types is "
            f"{config.get('layer_types')!r}; sliding windows are not supported in this format, "
            "whose own code does not apply them to every attention backend."
        )


def _check_windows(base: str, config: dict[str, Any]) -> None:
    """Refuse what vLLM's decoder would serve with other windows than Hugging Face's class has."""
    window, stated = config.get("sliding_window"), config.get("layer_types")
    if stated is not None and not (
        isinstance(stated, list) and all(isinstance(kind, str) for kind in stated)
    ):
        raise CheckpointError(f"layer_types is {stated!r}; expected a list of names, or none.")
    if stated is not None and len(stated) != config["num_hidden_layers"]:
        raise CheckpointError(
            f"layer_types names {len(stated)} layers; the model has {config['num_hidden_layers']}."
        )
    if window is not None and not is_count(window):
        raise CheckpointError(
            f"sliding_window is {window!r}; expected null or a number of tokens, at least 1."
        )
    types = set(stated or ())
    if FAMILIES[base].hf == "llama":
        right = types == {"sliding_attention"} if window else types <= {"full_attention"}
    elif config.get("use_sliding_window") and (window or "sliding_window" not in config):
        right = types == {"sliding_attention"}  # without the key, Hugging Face's window is 4096
    else:
        right = types <= {"full_attention"}
    if not right:
        raise CheckpointError(
            f"sliding_window {window!r} with use_sliding_window "
            f"{config.get('use_sliding_window')!r} and layer_types {sorted(types)} is "
            f"not supported on {base}: vLLM would give its layers other windows; supported are no "
            "window, or sliding_attention stated in layer_types for every layer."
        )
