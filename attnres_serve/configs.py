"""Hugging Face configuration classes of the served architectures.

They are module-level definitions because vLLM's engine core unpickles the configuration before it
loads plugins.  The own model_type makes plain Hugging Face loading fail loudly instead of running
the base model without its depth attention.
"""

from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from attnres_serve.families import FAMILIES
from attnres_serve.formats.keys import TRAINING_KEYS
from attnres_serve.formats.translation import Translation
from attnres_serve.spec import AttnResSpec


class AttnResLlamaConfig(LlamaConfig):
    model_type = "attnres_llama"


class AttnResGatedLlamaConfig(LlamaConfig):
    model_type = "attnres_gated_llama"


class AttnResQwen2Config(Qwen2Config):
    model_type = "attnres_qwen2"


class AttnResQwen3Config(Qwen3Config):
    model_type = "attnres_qwen3"


CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": AttnResLlamaConfig,
    "gated_llama": AttnResGatedLlamaConfig,
    "qwen2": AttnResQwen2Config,
    "qwen3": AttnResQwen3Config,
}


def register_model_types() -> None:
    """Make our own model types known to transformers (idempotent)."""
    for cls in CLASSES.values():
        AutoConfig.register(cls.model_type, cls, exist_ok=True)


def build(translation: Translation, name_or_path: str = "") -> PreTrainedConfig:
    """The configuration that vLLM and every one of its processes sees.

    Beside the base family's fields it holds ``attn_res`` (the normalised specification, None for
    standard residuals), ``attn_res_format`` and ``attn_res_qk_norm_eps``.
    """
    cls = CLASSES[translation.base]
    fields: dict[str, Any] = {
        key: value
        for key, value in translation.config.items()
        if key not in ("model_type", "architectures", *TRAINING_KEYS)
    }
    config = cls.from_dict(fields)
    config.name_or_path = name_or_path
    config.architectures = [FAMILIES[translation.base].architecture]
    config.attn_res = translation.spec.to_house() if translation.spec else None
    config.attn_res_format = translation.format
    config.attn_res_qk_norm_eps = translation.qk_norm_eps
    return config


def spec_of(config: PreTrainedConfig) -> AttnResSpec | None:
    """The specification in a configuration made by ``build``; None in one of another model."""
    if getattr(config, "attn_res", None) is None:
        return None
    return AttnResSpec.from_house(config.attn_res, config.num_hidden_layers, config.rms_norm_eps)
