"""flash-linear-attention's ``transformer``: a Llama, a Qwen2 or a Qwen3."""

from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import fla_keys
from attnres_serve.formats.parsed_config import ParsedConfig

# Keys that FLA's code does not read.
KNOWN = ("window_size", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm", "elementwise_affine")
QK_NORM_EPS = 1e-5  # FLA's RMSNorm default; its Attention never passes norm_eps on


def translate(config: dict[str, Any], name: str) -> ParsedConfig:
    """Parse a config.json; ``name`` is the format's."""
    fla_keys.counts_or_null(config, "num_kv_heads")
    fla_keys.flags(config, "qkv_bias", "qk_norm")
    fla_keys.check(config, KNOWN, "transformer")
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
    family = "qwen3" if qk_norm else "qwen2" if config.get("qkv_bias", False) else "llama"
    translated = _family_config(config)
    return ParsedConfig(
        format=name,
        family=family,
        config=translated,
        spec=fla_keys.spec(config, FAMILIES[family].layout(translated)),
        qk_norm_eps=QK_NORM_EPS if qk_norm else None,
    )


def _family_config(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_heads"]
    translated = fla_keys.family_config(config) | {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_kv_heads") or heads,
        "head_dim": config["hidden_size"] // heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.get("rope_theta", 10000.0)),
        },
        "attention_bias": config.get("qkv_bias", False),
    }
    if (window := config.get("window_size")) is not None:
        if not is_count(window):
            raise CheckpointError(
                f"window_size is {window!r}; expected null or a number of tokens, at least 1."
            )
        translated |= {
            "sliding_window": window,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
        }
    return translated
