"""Kimi Linear and Kimi K3 with Attention Residuals, under the names of Kimi's checkpoints.

The names are the house format's, with a prefix if the language model is part of a larger one.
``attn_res_block_size`` counts transformer layers.  Without it the model has standard residuals.
"""

import re
from typing import Any

from attnres_serve.compat.native import Native
from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.family_config import family_config
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.keys import refuse_unknown
from attnres_serve.formats.parsed_config import COMMON, ParsedConfig

NAME = "kimi_linear"
BLOCK = "attn_res_block_size"
BLOCKS = Blocks(BLOCK, "layers")
NATIVE = Native("vllm.transformers_utils.configs.kimi_linear", "KimiLinearConfig", BLOCK)
WHOLE, TEXT = "kimi_k3", "text_config"  # the model type, and the key of its language model
PREFIX = "language_model."
IMAGES = "images."  # of the names here for what reads images
_OF_IMAGES = re.compile(r"(vision_tower|mm_projector)\.")
_KEYS_OF_IMAGES = re.compile("vision|image|video|media|^(architectures|model_type|ignore_index)$")
_OF_THE_TEXT = (*COMMON, "tie_word_embeddings", "quantization_config")  # at either level


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
    translated = family_config(text, NAME, (BLOCK,), strictly=True)
    if not is_count(layers := text[BLOCK]):
        raise CheckpointError(
            f"{BLOCK} is {layers!r}; expected null (standard residuals) or a whole number of "
            "layers, at least 1."
        )
    family = FAMILIES[NAME]
    spec = AttnResSpec.by_layers(family.layout(text), layers, family.epsilon(text))
    return ParsedConfig(NAME, NAME, translated, spec)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model within that of a model which reads images too.

    Raises:
        CheckpointError: it has another type, or the outer one has further keys about it.
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
    return IMAGES + name if _OF_IMAGES.match(name) else name.removeprefix(PREFIX)


def stored_name(name: str) -> str:
    return name  # without the prefix, which the checkpoint may have


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name, native=NATIVE)
