"""Unknown and harmless keys of config.json, for all formats."""

import re
from collections.abc import Collection
from functools import cache
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.formats import connections

_CHANGES_THE_MODEL = re.compile(
    "attn|attention|residual|rope|rotary|original_max_position|position_embedding_type|alibi|"
    "causal|mask(?!_token)|window|sparse|sink|gate|norm|bias|activation|logit|softcap|multiplier|"
    "scal|mup|clip|expert|moe|lora_rank|quant|compression|encoder|text_config|per_layer|"
    "heterogeneous|block_configs|affine|bidirection|nope|no_pe|skip_layers|share_kv|swiglu"
)
_FOR_TRAINING = re.compile("dropout|drop$|flash_att")  # or the choice of a kernel
_HARMLESS = {
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "output_attentions",
}
# They have no effect on a served model.
TRAINING_KEYS = (
    "attention_dropout",
    "initializer_range",
    "max_window_layers",  # layer_types, where windows are served
    "pretraining_tp",
    "use_cache",
)


def refuse_unknown(
    config: dict[str, Any], known: Collection[str], model: str, strictly: bool = False
) -> None:
    """Raise CheckpointError for a key that ``model`` does not read and that changes other models.

    Keys without effect (null, false, empty, a factor of 1) are allowed.

    Args:
        config: a config.json, or a part of one.
        known: the keys that the model reads.
        model: its name, for messages.
        strictly: whether to refuse all other keys too, except those that Hugging Face writes for
            every model.
    """
    for key, value in config.items():
        if key in known or key in _HARMLESS or _FOR_TRAINING.search(key):
            continue
        if key in _of_every_model() if strictly else not _may_change_the_model(key):
            continue
        speaks = connections.speaks_of_them(key)
        if connections.is_set(key, config) if speaks else not says_nothing(key, value):
            raise CheckpointError(
                f"config.json has {key}: {value!r}, which {model} does not have; a model that was "
                "trained with it would be served wrongly, so remove the key only if yours was not."
            )


def _may_change_the_model(key: str) -> bool:
    if connections.speaks_of_them(key):
        return True
    return key not in connections.HARMLESS and _CHANGES_THE_MODEL.search(key) is not None


@cache
def _of_every_model() -> frozenset[str]:
    """Keys of every model's configuration, including those about generation."""
    from dataclasses import fields

    from transformers import GenerationConfig, PreTrainedConfig

    common = {field.name for field in fields(PreTrainedConfig)}
    named = {"_name_or_path", "name_or_path", "auto_map", "tokenizer_class", "use_cache"}
    return frozenset(common | {*GenerationConfig().to_dict()} | named)


def says_nothing(key: str, value: Any) -> bool:
    """Whether a value means the same as a missing key."""
    if key == "is_causal":
        return value is True
    if key == "text_config":  # transformers treats an empty one as the whole model
        return value is None
    if type(value) in (int, float):
        return bool(value == (1 if re.search("scal|multiplier|factor", key) else 0))
    return value is None or value is False or value in ("", [], {})
