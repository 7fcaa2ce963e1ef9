"""Checkpoints that are recognised as AttnRes but not supported: each gets a specific refusal."""

import re
from typing import Any

from attnres_serve.compat import source
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES

# vLLM serves these without us; the plugin must not interfere.
NATIVE_MODEL_TYPES = ("kimi_k3", "kimi_linear")
INKLING = "inkling2"  # a prefix: its parts have longer names
LAYERS_KEY = "attn_res_block_size"  # counts layers in Kimi's and SANA's files

# Keys of published formats.  The same key counts layers in one format and sublayers in another.
BLOCK_KEYS = (
    "attn_res_block_size",
    "attnres_block_size",
    "attnres_num_blocks",
    "attn_res_num_blocks",
    "block_attn_res_block_size",
    "n_layers_per_attn_res_block",
    "n_layers_per_attnres_block",
)
_SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "", "none")
OTHER_KEYS = ("attn_res", "attnres_mode", "attn_res_output_route", "use_attn_res")
MEGATRON_KEYS = ("attn_res_block_layers", "enable_attention_residuals")

# Names of formats, by model types and architectures.  Supported formats get here only if the two
# do not go together.
MODEL_TYPES = {
    "alice_ai": "AliceAI",
    "qwen3_attnres": "open-attnres / delta-attnres",
    "llama_attnres": "delta-attnres",
    "qwen3_ar": "Qwen3AR",
    "qwen3_dar": "Qwen3DAR (delta attention residuals)",
    "qwen3_gdar": "Qwen3GDAR (gated delta attention residuals)",
}
ARCHITECTURES = {
    "AliceAIForCausalLM": "AliceAI",
    "Qwen3AttnResForCausalLM": "open-attnres / delta-attnres",
    "LlamaAttnResForCausalLM": "delta-attnres",
    "Qwen3ARForCausalLM": "Qwen3AR",
    "Qwen3DARForCausalLM": "Qwen3DAR (delta attention residuals)",
    "Qwen3GDARForCausalLM": "Qwen3GDAR (gated delta attention residuals)",
    "Qwen3BlockAttnResForCausalLM": "torchtitan / SGLang fork",
    "KimiBlockAttnResForCausalLM": "torchtitan / SGLang fork on Kimi Linear",
}

# flash-linear-attention's other classes with the flag, and why they are not supported.
FLA_KEY = "attnres_block_size"
_NO_MIXER, _NO_MODEL = "vLLM has no layer for its mixer", "no class here puts vLLM's layer into it"
FLA_MIXERS = dict.fromkeys(
    (
        *("abc", "bitnet", "comba", "delta_net", "deltaformer", "forgetting_transformer"),
        *("gated_deltaproduct", "gla", "gsa", "hgrn", "hgrn2", "lightnet", "linear_attn"),
        *("log_linear_mamba2", "mesa_net", "moba", "mom", "nsa", "parallax", "path_attn", "raven"),
        *("retnet", "samba", "wall_transformer", "yoco"),
    ),
    _NO_MIXER,
) | {
    "mla": _NO_MODEL,
    "stickbreaking_attn": "FLA's own class does not read the key",
}

# Functions other than Block or Full AttnRes, by patterns of their keys, values and tensor names.
_VARIANTS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"null_source", "a null source"),
        (r"delta", "delta attention residuals"),
        (r"gate|alpha", "a gate beside the mix"),
        (r"head|_mh\b|_hw\b", "multi-head depth attention"),
        (r"window|stride|dilation", "a window over depth"),
        (r"sigmoid|activation", "another function than softmax over depth"),
        (r"input|dynamic|key_proj|query_proj", "queries that depend on the input"),
        (r"(\b|_)v_res|_v\b", "values with a depth attention of their own"),
        (r"split", "residual streams of their own for attention and MLP"),
    )
]


def variant(text: str) -> str:
    """`` (description)`` for a key, value or tensor name of an unsupported function."""
    return next((f" ({name})" for pattern, name in _VARIANTS if pattern.search(text)), "")


def _refuse_by_name(config: dict[str, Any]) -> None:
    """Raise for known models that this package cannot compute."""
    model_type = str(config.get("model_type"))
    if model_type.startswith(INKLING):
        raise CheckpointError(
            f"model_type is {model_type!r}: Inkling 2 mixes normed rows, in some layers by other "
            "queries for each of query, key and value, which is another function than Block or "
            "Full AttnRes; run it with the code that it was released with."
        )
    if model_type in FLA_MIXERS and config.get(FLA_KEY) is not None:
        raise CheckpointError(
            f"config.json has {FLA_KEY}: {config[FLA_KEY]!r} with model_type {model_type!r}, a "
            f"class of flash-linear-attention: {FLA_MIXERS[model_type]}; of FLA's classes "
            "'transformer', 'gated_deltanet' and 'kda' are served."
        )
    if str(config.get("_class_name")).startswith("SanaVideo") and config.get(LAYERS_KEY):
        raise CheckpointError(
            f"_class_name is {config['_class_name']!r}: SANA-Video 2 is a diffusion model, with "
            "one query for all sublayers of a kind, and language models are served here; run it "
            "with diffusers."
        )


def refuse_if_attnres(config: dict[str, Any], supported: str) -> None:
    """Raise for a config that matches no supported format but describes AttnRes.

    Args:
        config: the content of config.json.
        supported: a sentence about the supported formats.

    Raises:
        CheckpointError: says what config.json has and what would be supported.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    is_variant = str(model_type).startswith(INKLING) or str(architecture) in ARCHITECTURES
    if is_variant and source.lists_architecture(str(architecture)):
        return
    _refuse_by_name(config)
    if model_type in NATIVE_MODEL_TYPES and str(architecture) not in ARCHITECTURES:
        return
    beside = f"model_type {model_type!r} and architecture {architecture!r}"
    format_name = MODEL_TYPES.get(str(model_type)) or ARCHITECTURES.get(str(architecture))
    if format_name:
        raise CheckpointError(
            f"this looks like a checkpoint of the {format_name} format, but no supported format "
            f"has {beside} together; {supported}."
        )
    stated = {
        key: config[key]
        for key in (*MEGATRON_KEYS, *BLOCK_KEYS, *OTHER_KEYS)
        if config.get(key) not in _SWITCHED_OFF
    }
    if not stated:
        return
    key, value = next(iter(stated.items()))
    if key in MEGATRON_KEYS:
        raise CheckpointError(
            f"config.json has {key}: {value!r}, a setting of Megatron-LM's Attention Residuals, "
            "for which no Hugging Face format of tensors has been published; describe the model in "
            "the house format (attn_res.block_size, in sublayers)."
        )
    if key in BLOCK_KEYS:
        raise CheckpointError(
            f"config.json has {key}: {value!r} beside {beside}, which no supported format uses "
            "together: the unit of the key is ambiguous (layers in some formats, sublayers or a "
            "number of blocks in others); describe the model in the house format "
            "(attn_res.block_size, in sublayers)."
        )
    family = FAMILIES.get(str(model_type))
    if key == "attn_res" and isinstance(value, dict) and family is not None:
        raise CheckpointError(
            f"config.json has {key}: {value!r} beside {beside}; in the house format set model_type "
            f'to "{family.model_type}" and architectures to ["{family.architecture}"].'
        )
    raise CheckpointError(
        f"config.json has {key}: {value!r} beside {beside}, which no supported format uses "
        f"together; {supported}."
    )
