"""Checkpoints that are recognised as AttnRes but not served: each is refused by its name."""

from typing import Any

from attnres_serve.errors import CheckpointError

# Served by vLLM itself; the plugin must not stand in the way.
NATIVE_MODEL_TYPES = ("kimi_k3", "kimi_linear")

# Keys of the formats at large.  The same key counts layers in one format and sublayers in another.
BLOCK_KEYS = (
    "attn_res_block_size",
    "attnres_block_size",
    "attnres_num_blocks",
    "attn_res_num_blocks",
)
_SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "", "none")
OTHER_KEYS = ("attn_res", "attnres_mode", "attn_res_output_route", "use_attn_res")

MODEL_TYPES = {
    "qwen3_attnres": "open-attnres / delta-attnres",
    "llama_attnres": "delta-attnres",
    "qwen3_ar": "Qwen3AR",
}
ARCHITECTURES = {
    "Qwen3AttnResForCausalLM": "open-attnres / delta-attnres",
    "LlamaAttnResForCausalLM": "delta-attnres",
    "Qwen3ARForCausalLM": "Qwen3AR",
    "Qwen3BlockAttnResForCausalLM": "torchtitan / SGLang fork",
}


def refuse_if_attnres(config: dict[str, Any]) -> None:
    """Raise for a config that no served format claims but that describes AttnRes all the same.

    Raises:
        CheckpointError: with what was found and what would be served instead.
    """
    model_type = config.get("model_type")
    if model_type in NATIVE_MODEL_TYPES:
        return
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    format_name = MODEL_TYPES.get(str(model_type)) or ARCHITECTURES.get(str(architecture))
    if format_name:
        raise CheckpointError(
            f"this is a checkpoint of the {format_name} format (model_type {model_type!r}, "
            f"architecture {architecture!r}), which is not supported yet; supported are FLA's "
            "transformer and the house format."
        )
    keys = (*BLOCK_KEYS, *OTHER_KEYS)
    found = {key: config[key] for key in keys if config.get(key) not in _SWITCHED_OFF}
    if not found:
        return
    key, value = next(iter(found.items()))
    if key in BLOCK_KEYS:
        raise CheckpointError(
            f"config.json has {key}: {value!r} beside model_type {model_type!r} and architecture "
            f"{architecture!r}, which no supported format uses together: the unit of the key is "
            "ambiguous (layers in some formats, sublayers or a number of blocks in others); "
            "describe the model in the house format (attn_res.block_size, in sublayers)."
        )
    raise CheckpointError(
        f"config.json has {key}: {value!r} beside model_type {model_type!r} and architecture "
        f"{architecture!r}, which no supported format uses together; supported are FLA's "
        "transformer and the house format."
    )
