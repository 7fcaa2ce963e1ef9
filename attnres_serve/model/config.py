"""The configuration of a served model: that of its family, with the fields of AttnRes.

In memory it has the family's class and model_type, from which vLLM derives latent attention and
other peculiarities.  Only config.json has a model_type of this project, with which plain Hugging
Face loading fails instead of running the model without its depth attention.
"""

import importlib
from copy import deepcopy
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.families import FAMILIES, layout_of
from attnres_serve.families.family import FURTHER, Family
from attnres_serve.formats.keys import TRAINING_KEYS
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import MTP

# The fields of AttnRes, beside those of the family.
ATTN_RES_FIELDS = ("attn_res", "attn_res_format", "attn_res_qk_norm_eps", "attn_res_config")


def register_model_types() -> None:
    """Let transformers read a config.json with a model type of this project, as for a tokenizer.

    No model class is registered (idempotent).
    """
    for family in FAMILIES.values():
        attributes = {"model_type": family.model_type}
        AutoConfig.register(
            family.model_type, type("AttnResConfig", (PreTrainedConfig,), attributes), exist_ok=True
        )


def class_of(family: Family) -> type[PreTrainedConfig]:
    """The class of a family's configurations."""
    if family.config_class is None:
        config_class: type[PreTrainedConfig] = CONFIG_MAPPING[family.hf]
    else:
        module, _, name = family.config_class.partition(":")
        config_class = getattr(importlib.import_module(module), name)
    return config_class


def build(
    parsed: ParsedConfig, name_or_path: str = "", for_drafts: bool = False
) -> PreTrainedConfig:
    """The configuration for vLLM and all its processes.

    Beside the family's fields it holds ``attn_res`` (the normalised specification, None for
    standard residuals), ``attn_res_format``, ``attn_res_qk_norm_eps`` and ``attn_res_config`` (the
    family's config.json, with its keys on disk).

    Args:
        parsed: the resolver's result for config.json.
        name_or_path: the model's name or path.
        for_drafts: whether vLLM takes drafts from the model.  vLLM chooses its class for a
            checkpoint's draft head by the architecture of the model.
    """
    family = FAMILIES[parsed.family]
    fields: dict[str, Any] = {
        key: value
        for key, value in parsed.config.items()
        if key not in ("model_type", "architectures", *TRAINING_KEYS)
    }
    config: PreTrainedConfig = class_of(family).from_dict(fields)
    family.adapt(config)
    config.name_or_path = name_or_path
    config.architectures = [family.architecture]
    if for_drafts and family.draft is not None and (layers := family.draft.layers(fields)):
        config.architectures = [family.draft.architecture or family.stock_architecture]
        if family.draft.cls is not None:  # vLLM must not choose a class by the model type
            config.model_type, config.n_predict = MTP, layers
            setattr(config, FURTHER, layers)
    config.attn_res = parsed.spec.to_house() if parsed.spec else None
    config.attn_res_format = parsed.format
    config.attn_res_qk_norm_eps = parsed.qk_norm_eps
    # A copy: vLLM writes the name of its type into DeepSeek's rope_parameters.
    config.attn_res_config = deepcopy(parsed.config) | {"model_type": family.model_type}
    return config


def spec_of(config: PreTrainedConfig) -> AttnResSpec | None:
    """The specification in a configuration made by ``build``; None for other models."""
    if getattr(config, "attn_res", None) is None:
        return None
    layout = layout_of(config.attn_res_config)
    return AttnResSpec.from_house(config.attn_res, layout, None)  # attn_res states the epsilon
