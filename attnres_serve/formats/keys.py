"""What formats share about the keys of config.json: which are unknown, and what values may be."""

import re
from collections.abc import Collection
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.translation import Translation
from attnres_serve.spec import is_count, is_number

_CHANGES_THE_MODEL = re.compile(
    "attn|attention|residual|rope|rotary|original_max_position|position_embedding_type|alibi|"
    "causal|mask(?!_token)|window|sparse|sink|gate|norm|bias|activation|logit|softcap|multiplier|"
    "scal|mup|clip|expert|moe|lora_rank|quant|compression|encoder|text_config|per_layer|"
    "heterogeneous|block_configs|affine|bidirection|nope|no_pe|skip_layers|share_kv"
)
_FOR_TRAINING = re.compile("dropout|drop$|flash_att")  # or the choice of a kernel
_HARMLESS = {
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "output_attentions",
}
# They change nothing where a model is served, whatever their value.
TRAINING_KEYS = (
    "attention_dropout",
    "initializer_range",
    "max_window_layers",  # layer_types, where windows are served
    "pretraining_tp",
    "use_cache",
)
_DTYPES = ("float32", "float16", "bfloat16")
# For each type of rotary embedding what it needs, beside rope_theta: those that vLLM computes as
# Hugging Face's classes do.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
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


# What Hugging Face's classes and vLLM take where nothing is stated.
ROPE_DEFAULTS = {"partial_rotary_factor": 1, "beta_fast": 32, "beta_slow": 1}
FREQ_FACTORS = (("low", 1), ("high", 2))  # stand-ins where a type has none
LONGEST = 2**31 - 1  # tokens of a context


def refuse_unknown(config: dict[str, Any], known: Collection[str], model: str) -> None:
    """Raise CheckpointError for a key that ``model`` does not read and that changes other models.

    A key that says nothing (null, false, nothing at all, a factor of 1) may be there.
    """
    for key, value in config.items():
        if key in known or key in _HARMLESS or _FOR_TRAINING.search(key):
            continue
        if not _CHANGES_THE_MODEL.search(key):
            continue
        if not _says_nothing(key, value):
            raise CheckpointError(
                f"config.json has {key}: {value!r}, which {model} does not have; a model that was "
                "trained with it would be served wrongly, so remove the key only if yours was not."
            )


def _says_nothing(key: str, value: Any) -> bool:
    if key == "is_causal":
        return value is True
    if key == "text_config":  # transformers takes an empty one for the whole model
        return value is None
    if type(value) in (int, float):
        return value == (1 if re.search("scal|multiplier|factor", key) else 0)
    return value is None or value is False or value in ("", [], {})


def check_base(translation: Translation) -> None:
    """Raise CheckpointError for a value that vLLM or Hugging Face's class would stumble over."""
    base, config = translation.base, translation.config
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        if type(config.get(key, False)) is not bool:
            raise CheckpointError(f"{key} is {config[key]!r}; expected true or false.")
    longest: Any = config.get("max_position_embeddings", 1)
    if not is_count(longest) or longest > LONGEST:
        raise CheckpointError(
            f"max_position_embeddings is {longest!r}; expected a whole number of tokens, from 1 to "
            f"{LONGEST}."
        )
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act is {act!r}; supported on {base} is 'silu'.")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and str(config[key]).removeprefix("torch.") not in _DTYPES:
            raise CheckpointError(
                f"{key} is {config[key]!r}; expected null, {', '.join(_DTYPES[:-1])} or "
                f"{_DTYPES[-1]}."
            )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = config.get(key)
        ids = found if isinstance(found, list) and key.startswith("eos") else [found]
        if found is not None and not all(type(token) is int for token in ids):
            raise CheckpointError(f"{key} is {found!r}; expected the number of a token, or null.")
    _check_heads(base, config)
    _check_rope(config)


def _check_heads(base: str, config: dict[str, Any]) -> None:
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, kv_heads = (config.get(key, 0) for key in sizes)
    head: Any = config.get("head_dim")
    if not (is_count(hidden) and is_count(heads) and is_count(kv_heads)):
        return  # told where shapes are made of them
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}."
        )
    if FAMILIES[base].hf != "qwen3" and hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads}, as Hugging "
            f"Face's {base} needs."
        )
    if base == "qwen2" and head not in (None, hidden // heads):
        raise CheckpointError(
            f"head_dim is {head!r}, but vLLM's qwen2 has hidden_size / num_attention_heads "
            f"({hidden // heads}) always; remove the key if the model was trained so."
        )
    if head is None and base != "qwen3":
        head = hidden // heads
    if is_count(head) and head % 2:
        raise CheckpointError(f"head_dim is {head}; rotary embedding needs an even number.")


def _check_rope(config: dict[str, Any]) -> None:
    """Judge the rotary embedding, of which either key may speak, rope_scaling first."""
    theta = config.get("rope_theta")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key)
    if rope is None:
        rope = {}
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"{key} is {rope!r}; expected an object such as {{'rope_type': 'default'}}."
        )
    kind, other = (rope.get(name) for name in ("rope_type", "type"))
    kind = kind if kind is not None else "default" if other is None else other
    needed = ROPE_TYPES.get(kind) if isinstance(kind, str) else None
    if needed is None or other not in (None, kind):
        raise CheckpointError(
            f"{key} is {rope!r}: a rotary embedding of this type is not supported; supported are "
            f"{', '.join(ROPE_TYPES)}."
        )
    usual = ROPE_DEFAULTS | ({"factor": 1} if kind == "default" else {})
    values = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_type", "type") and value not in (None, usual.get(name))
    }
    for name in sorted({*needed, *values}):
        if name not in (*needed, "rope_theta") or name not in values:
            raise CheckpointError(
                f"{key} is {rope!r}: "
                + (f"it lacks {name}" if name in needed else f"{name} is not supported")
                + f"; the type {kind!r} has rope_theta{''.join(f', {n}' for n in needed)}."
            )
    if kind != "default" and (config | rope).get("rope_theta", 1) is None:
        raise CheckpointError("rope_theta is None; give a positive number or remove the key.")
    for name, value in (*values.items(), ("rope_theta", 1 if theta is None else theta)):
        if not is_number(value) or value <= 0:
            raise CheckpointError(f"{name} is {value!r}; expected a positive number.")
        if name == "original_max_position_embeddings" and not is_count(value):
            raise CheckpointError(f"{name} is {value!r}; expected a whole number of tokens.")
    low, high = (values.get(f"{name}_freq_factor", default) for name, default in FREQ_FACTORS)
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor is {low!r} and high_freq_factor {high!r}; expected the first to be "
            "smaller."
        )
