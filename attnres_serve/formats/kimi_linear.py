"""Kimi Linear with Attention Residuals: the names of Kimi's checkpoints are the house format's.

``attn_res_block_size`` counts transformer layers.  Without it the model has standard residuals.
"""

from typing import Any

from attnres_serve.compat.native import Native
from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import refused
from attnres_serve.formats.base_config import base_config
from attnres_serve.formats.parsed_config import ParsedConfig

NAME = "kimi_linear"
BLOCK = "attn_res_block_size"
NATIVE = Native("vllm.transformers_utils.configs.kimi_linear", "KimiLinearConfig", BLOCK)


def matches(config: dict[str, Any]) -> bool:
    return (
        config.get("model_type") == NAME
        and config.get("architectures") == ["KimiLinearForCausalLM"]
        and config.get(BLOCK) is not None
    )


def translate(config: dict[str, Any]) -> ParsedConfig:
    refused.refuse_latent_experts(config)
    base = base_config(config, NAME, (BLOCK,))
    if not is_count(layers := config[BLOCK]):
        raise CheckpointError(
            f"{BLOCK} is {layers!r}; expected null (standard residuals) or a whole number of "
            "layers, at least 1."
        )
    family = FAMILIES[NAME]
    spec = AttnResSpec.by_layers(family.layout(config), layers, family.epsilon(config))
    return ParsedConfig(NAME, NAME, base, spec)


def rename(name: str) -> str:
    return name
