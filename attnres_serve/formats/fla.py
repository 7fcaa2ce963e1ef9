"""Classes of flash-linear-attention: AttnRes when ``attnres_block_size`` is a number, the
standard-residual twin when it is null.

The name ``transformer`` is not FLA's alone: a checkpoint is claimed only if model_type,
architecture and FLA's own keys agree and it brings no code of its own (``auto_map``).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from attnres_serve.formats import fla_delta, fla_transformer
from attnres_serve.formats.fla_keys import OWN_KEYS
from attnres_serve.formats.format import Blocks
from attnres_serve.formats.parsed_config import ParsedConfig

NAME = "fla"
BLOCKS = Blocks("attnres_block_size", "sublayers")
OWN_LAYER_NAMES = "FLA"


class Served(NamedTuple):
    """A class of FLA's.

    Attributes:
        architecture: its name in config.json.
        keys: those that FLA writes for it always, beside those of every class.
        translate: from its config.json and the format's name to a parsed.
    """

    architecture: str
    keys: frozenset[str]
    translate: Callable[[dict[str, Any], str], ParsedConfig]


CLASSES = {
    "transformer": Served("TransformerForCausalLM", frozenset(), fla_transformer.translate),
    "gated_deltanet": Served(
        "GatedDeltaNetForCausalLM", fla_delta.OWN_KEYS, fla_delta.gated_deltanet
    ),
    "kda": Served("KDAForCausalLM", fla_delta.OWN_KEYS, fla_delta.kda),
}

RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.res_(proj|norm)\.", r"model.output_attn_res_\1."),
        (r"^(model\.layers\.\d+)\.attn_res_(proj|norm)\.", r"\1.self_attention_res_\2."),
        (r"^(model\.layers\.\d+)\.attn_norm\.", r"\1.input_layernorm."),
        (r"^(model\.layers\.\d+)\.mlp_norm\.", r"\1.post_attention_layernorm."),
        (r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn."),
        # of Kimi Delta Attention, each of two linear layers
        (r"^(model\.layers\.\d+\.self_attn\.[fg])_proj\.0\.", r"\1_a_proj."),
        (r"^(model\.layers\.\d+\.self_attn\.[fg])_proj\.1\.", r"\1_b_proj."),
    )
]


def matches(config: dict[str, Any]) -> bool:
    found = CLASSES.get(str(config.get("model_type")))
    return (
        found is not None
        and config.get("architectures") == [found.architecture]
        and set(config) >= OWN_KEYS | found.keys
        and "auto_map" not in config
    )


def translate(config: dict[str, Any]) -> ParsedConfig:
    return CLASSES[config["model_type"]].translate(config, NAME)


def rename(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name
