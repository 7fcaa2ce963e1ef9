"""Checks and keys that the configurations of flash-linear-attention's classes share."""

from collections.abc import Iterable
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec, is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.keys import refuse_unknown
from attnres_serve.formats.parsed_config import kept

OWN_KEYS = frozenset(
    ("attnres_block_size", "hidden_size", "num_hidden_layers", "num_heads", "norm_eps")
)
# The keys that are read here, and those about fused training kernels.
KNOWN = (*OWN_KEYS, "fuse_norm", "fuse_swiglu", "quantization_config")


def check(config: dict[str, Any], known: Iterable[str], name: str) -> None:
    """Raise CheckpointError for a value that no FLA class supports, or a key of other models.

    Args:
        config: the config.json.
        known: keys of the class besides those of every class.
        name: of the class, for messages.
    """
    for key in ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size"):
        if not is_count(config.get(key)):
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; expected a whole number of at least 1."
            )
    counts_or_null(config, "intermediate_size", "max_position_embeddings")
    ratio = config.get("hidden_ratio")
    if ratio is not None and (not is_number(ratio) or ratio <= 0):
        raise CheckpointError(f"hidden_ratio is {ratio!r}; expected null or a positive number.")
    flags(config, "tie_word_embeddings")
    if not is_number(config["norm_eps"]) or config["norm_eps"] <= 0:
        raise CheckpointError(f"norm_eps is {config['norm_eps']!r}; expected a positive number.")
    refuse_unknown(config, {*KNOWN, *known}, f"FLA's {name}")
    if config.get("hidden_act", "swish") != "swish":
        raise CheckpointError(
            f"hidden_act is {config['hidden_act']!r}; only FLA's 'swish' is supported."
        )


def counts_or_null(config: dict[str, Any], *keys: str) -> None:
    """Raise CheckpointError unless each key is null, missing or a whole number of at least 1."""
    for key in keys:
        if config.get(key) is not None and not is_count(config[key]):
            raise CheckpointError(
                f"{key} is {config[key]!r}; expected null or a whole number of at least 1."
            )


def flags(config: dict[str, Any], *keys: str) -> None:
    """Raise CheckpointError unless each key is true, false or missing."""
    for key in keys:
        if type(config.get(key, False)) is not bool:
            raise CheckpointError(f"{key} is {config[key]!r}; expected true or false.")


def spec(config: dict[str, Any], layout: Layout) -> AttnResSpec | None:
    """The depth attention of a config.json, None for standard residuals."""
    size = config["attnres_block_size"]
    if size is None:
        return None
    if not is_count(size) or (size != 1 and size % 2):
        raise CheckpointError(
            f"attnres_block_size is {size!r}; FLA counts sublayers and allows null (standard "
            "residuals), 1 (Full AttnRes) or an even number."
        )
    return AttnResSpec.uniform(layout, size, config["norm_eps"])


def family_config(config: dict[str, Any]) -> dict[str, Any]:
    """The common keys of every FLA class, under the names of Hugging Face's families."""
    return kept(
        config, "hidden_size", "num_hidden_layers", "initializer_range", "quantization_config"
    ) | {
        "intermediate_size": config.get("intermediate_size") or _intermediate_size(config),
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def _intermediate_size(config: dict[str, Any]) -> int:
    """FLA's rule for a null size: two thirds of hidden_ratio, up to the next multiple of 256."""
    ratio = config.get("hidden_ratio") or 4
    return -(-int(config["hidden_size"] * ratio * 2 / 3) // 256) * 256
