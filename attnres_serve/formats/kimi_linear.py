"""Kimi Linear and Kimi K3 with Attention Residuals, in the names of Kimi's checkpoints.

They are the house format's, with a prefix where the language model is a part of a larger one.
``attn_res_block_size`` counts transformer layers.  Without it the model has standard residuals.
"""

import re
from typing import Any

from attnres_serve.compat.native import Native
from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.base_config import base_config
from attnres_serve.formats.format import Blocks
from attnres_serve.formats.keys import refuse_unknown
from attnres_serve.formats.parsed_config import COMMON, ParsedConfig

NAME = "kimi_linear"
BLOCK = "attn_res_block_size"
BLOCKS = Blocks(BLOCK, "layers")
NATIVE = Native("vllm.transformers_utils.configs.kimi_linear", "KimiLinearConfig", BLOCK)
WHOLE, TEXT = "kimi_k3", "text_config"  # the model type, and where its language model is described
PREFIX = "language_model."
ASIDE = "images."  # of the names here for what reads images
_OF_IMAGES = re.compile(r"(vision_tower|mm_projector)\.")
_KEYS_OF_IMAGES = re.compile("vision|image|video|media|^(architectures|model_type|ignore_index)$")
_OF_THE_TEXT = (*COMMON, "tie_word_embeddings", "quantization_config")  # stated in either place


def matches(config: dict[str, Any]) -> bool:
    if config.get("model_type") == WHOLE:
        text = config.get(TEXT)
        is_ours = config.get("architectures") == ["KimiK3ForConditionalGeneration"]
        return is_ours and isinstance(text, dict) and text.get(BLOCK) is not None
    return (
        config.get("model_type") == NAME
        and config.get("architectures") == ["KimiLinearForCausalLM"]
        and config.get(BLOCK) is not None
    )


def translate(config: dict[str, Any]) -> ParsedConfig:
    text = _text(config) if config["model_type"] == WHOLE else config
    base = base_config(text, NAME, (BLOCK,), strictly=True)
    if not is_count(layers := text[BLOCK]):
        raise CheckpointError(
            f"{BLOCK} is {layers!r}; expected null (standard residuals) or a whole number of "
            "layers, at least 1."
        )
    family = FAMILIES[NAME]
    spec = AttnResSpec.by_layers(family.layout(text), layers, family.epsilon(text))
    return ParsedConfig(NAME, NAME, base, spec)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model, by that of a model which reads images too.

    Raises:
        CheckpointError: it is of another type, or the whole one says more of it.
    """
    text: dict[str, Any] = config[TEXT]
    if text.get("model_type", NAME) != NAME:
        raise CheckpointError(
            f"model_type in {TEXT} is {text['model_type']!r}; expected {NAME!r}, as Kimi K3 has it."
        )
    around = {key: value for key, value in config.items() if not _KEYS_OF_IMAGES.search(key)}
    refuse_unknown(around, {TEXT, *_OF_THE_TEXT}, "Kimi K3 beside its text_config", strictly=True)
    stated = {key: config[key] for key in _OF_THE_TEXT if config.get(key) is not None}
    return stated | text | {"model_type": NAME, "architectures": ["KimiLinearForCausalLM"]}


def rename(name: str) -> str:
    return ASIDE + name if _OF_IMAGES.match(name) else name.removeprefix(PREFIX)


def own_name(name: str) -> str:
    return name  # which a part of a larger model may have too
