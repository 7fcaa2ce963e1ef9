"""Classes of flash-linear-attention: AttnRes when ``attnres_block_size`` is a number, the
baseline with standard residuals when it is null.

Others use the name ``transformer`` too: a checkpoint matches only if model_type, architecture and
FLA's keys agree and it has no code (``auto_map``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from attnres_serve.formats import fla_delta, fla_transformer
from attnres_serve.formats.fla_keys import OWN_KEYS
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.prefixes import Prefixes

NAME = "fla"
BLOCKS = Blocks("attnres_block_size", "sublayers")


class Served(NamedTuple):
    """An FLA class.

    Attributes:
        architecture: its name in config.json.
        keys: keys that FLA always writes for it, besides those of every class.
        translate: gives a ParsedConfig from its config.json and the format's name.
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

_NAMES = Prefixes(
    ("model.embeddings.", "model.embed_tokens."),
    ("model.res_", "model.output_attn_res_"),
    ("model.layers.#.attn_res_", "model.layers.#.self_attention_res_"),
    ("model.layers.#.attn_norm.", "model.layers.#.input_layernorm."),
    ("model.layers.#.mlp_norm.", "model.layers.#.post_attention_layernorm."),
    # of Kimi Delta Attention, each of two linear layers
    ("model.layers.#.attn.f_proj.0.", "model.layers.#.self_attn.f_a_proj."),
    ("model.layers.#.attn.f_proj.1.", "model.layers.#.self_attn.f_b_proj."),
    ("model.layers.#.attn.g_proj.0.", "model.layers.#.self_attn.g_a_proj."),
    ("model.layers.#.attn.g_proj.1.", "model.layers.#.self_attn.g_b_proj."),
    ("model.layers.#.attn.", "model.layers.#.self_attn."),
)
rename, stored_name = _NAMES.rename, _NAMES.stored_name


def matches(config: dict[str, Any]) -> bool:
    served = CLASSES.get(str(config.get("model_type")))
    return (
        served is not None
        and config.get("architectures") == [served.architecture]
        and set(config) >= OWN_KEYS | served.keys
        and "auto_map" not in config
    )


def translate(config: dict[str, Any]) -> ParsedConfig:
    return CLASSES[config["model_type"]].translate(config, NAME)


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name, layer_names_of="FLA")
