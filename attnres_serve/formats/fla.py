"""flash-linear-attention's ``transformer``: AttnRes when ``attnres_block_size`` is a number, the
standard-residual twin when it is null.

The name ``transformer`` is not FLA's alone: a checkpoint is claimed only if model_type,
architecture and FLA's own keys agree and it brings no code of its own (``auto_map``).
"""

import re
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec, is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.keys import refuse_unknown
from attnres_serve.formats.translation import Translation, kept

NAME = "fla"
OWN_KEYS = {"attnres_block_size", "hidden_size", "num_hidden_layers", "num_heads", "norm_eps"}
# Whether kernels of training are fused, and what no code of FLA's reads, beside what is read here.
KNOWN = (*OWN_KEYS, "window_size", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm", "fuse_norm")
KNOWN += ("fuse_swiglu", "elementwise_affine", "quantization_config")
QK_NORM_EPS = 1e-5  # FLA's RMSNorm default; its Attention never passes norm_eps on

RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.res_(proj|norm)\.", r"model.output_attn_res_\1."),
        (r"^(model\.layers\.\d+)\.attn_res_(proj|norm)\.", r"\1.self_attention_res_\2."),
        (r"^(model\.layers\.\d+)\.attn_norm\.", r"\1.input_layernorm."),
        (r"^(model\.layers\.\d+)\.mlp_norm\.", r"\1.post_attention_layernorm."),
        (r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    )
]


def claims(config: dict[str, Any]) -> bool:
    return (
        config.get("model_type") == "transformer"
        and config.get("architectures") == ["TransformerForCausalLM"]
        and set(config) >= OWN_KEYS
        and "auto_map" not in config
    )


def translate(config: dict[str, Any]) -> Translation:
    for key in ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size"):
        if not is_count(config.get(key)):
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; expected a whole number of at least 1."
            )
    for key in ("num_kv_heads", "intermediate_size", "max_position_embeddings"):
        if config.get(key) is not None and not is_count(config[key]):
            raise CheckpointError(
                f"{key} is {config[key]!r}; expected null or a whole number of at least 1."
            )
    ratio = config.get("hidden_ratio")
    if ratio is not None and (not is_number(ratio) or ratio <= 0):
        raise CheckpointError(f"hidden_ratio is {ratio!r}; expected null or a positive number.")
    for key in ("qkv_bias", "qk_norm", "tie_word_embeddings"):
        if type(config.get(key, False)) is not bool:
            raise CheckpointError(f"{key} is {config[key]!r}; expected true or false.")
    if not is_number(config["norm_eps"]) or config["norm_eps"] <= 0:
        raise CheckpointError(f"norm_eps is {config['norm_eps']!r}; expected a positive number.")
    refuse_unknown(config, KNOWN, "FLA's transformer")
    if config.get("hidden_act", "swish") != "swish":
        raise CheckpointError(
            f"hidden_act is {config['hidden_act']!r}; only FLA's 'swish' is supported."
        )
    hidden, heads = config["hidden_size"], config["num_heads"]
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not divisible by num_heads {heads}, as FLA's attention needs."
        )
    if heads % (config.get("num_kv_heads") or heads):
        raise CheckpointError(
            f"num_heads {heads} is not divisible by num_kv_heads {config['num_kv_heads']}, as "
            "FLA's attention needs."
        )
    theta = config.get("rope_theta", 10000.0)
    if not is_number(theta) or theta <= 0:
        raise CheckpointError(
            f"rope_theta is {theta!r}; expected the base of the rotary embedding, a positive "
            "number."
        )
    if config.get("rope_scaling") is not None:
        raise CheckpointError(
            f"rope_scaling is {config['rope_scaling']!r}; FLA's transformer has no scaled rotary "
            "embedding, so remove the key if the model was trained without it."
        )
    qk_norm = config.get("qk_norm", False)
    name = "qwen3" if qk_norm else "qwen2" if config.get("qkv_bias", False) else "llama"
    base = _base_config(config)
    return Translation(
        format=NAME,
        base=name,
        config=base,
        spec=_spec(config, FAMILIES[name].layout(base)),
        qk_norm_eps=QK_NORM_EPS if qk_norm else None,
    )


def rename(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _spec(config: dict[str, Any], layout: Layout) -> AttnResSpec | None:
    size = config["attnres_block_size"]
    if size is None:
        return None
    if not is_count(size) or (size != 1 and size % 2):
        raise CheckpointError(
            f"attnres_block_size is {size!r}; FLA counts sublayers and allows null (standard "
            "residuals), 1 (Full AttnRes) or an even number."
        )
    return AttnResSpec.uniform(layout, size, config["norm_eps"])


def _base_config(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_heads"]
    base = kept(
        config, "hidden_size", "num_hidden_layers", "initializer_range", "quantization_config"
    )
    base |= {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_kv_heads") or heads,
        "head_dim": hidden // heads,
        "intermediate_size": config.get("intermediate_size") or _intermediate_size(config),
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.get("rope_theta", 10000.0)),
        },
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "attention_bias": config.get("qkv_bias", False),
    }
    if (window := config.get("window_size")) is not None:
        if not is_count(window):
            raise CheckpointError(
                f"window_size is {window!r}; expected null or a number of tokens, at least 1."
            )
        base |= {
            "sliding_window": window,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
        }
    return base


def _intermediate_size(config: dict[str, Any]) -> int:
    """FLA's rule for a null size: two thirds of hidden_ratio, up to the next multiple of 256."""
    ratio = config.get("hidden_ratio") or 4
    return -(-int(config["hidden_size"] * ratio * 2 / 3) // 256) * 256
