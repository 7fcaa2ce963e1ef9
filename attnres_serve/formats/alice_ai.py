"""The format of AliceAI.

``block_attn_res_block_size`` counts transformer layers, null for standard residuals.  Other keys of
this kind come from older trainings, and AliceAI's code does not read them.  The first site has no
tensors, because it reads only the embedding.
"""

import re
from typing import Any

from attnres_serve.compat.native import MODELS, Native
from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.family_config import family_config
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.prefixes import Prefixes

NAME = "alice_ai"
NATIVE = Native(f"{MODELS}.alice_ai")
BLOCK = "block_attn_res_block_size"
BLOCKS = Blocks(BLOCK, "layers")
_OLDER = re.compile(r"(block_)?attn_?res_")
_NAMES = Prefixes(
    ("model.attnres_final.res_proj.", "model.output_attn_res_proj."),
    ("model.attnres_final.res_norm_weight", "model.output_attn_res_norm.weight"),
    ("model.layers.#.attn_res_proj.", "model.layers.#.self_attention_res_proj."),
    ("model.layers.#.attn_res_norm_weight", "model.layers.#.self_attention_res_norm.weight"),
    ("model.layers.#.mlp_res_norm_weight", "model.layers.#.mlp_res_norm.weight"),
    ("model.layers.#.linear_attn.a_log_bias", "model.layers.#.linear_attn.A_log"),
)
rename, stored_name = _NAMES.rename, _NAMES.stored_name


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == NAME and config.get("architectures") == [
        "AliceAIForCausalLM"
    ]


def translate(config: dict[str, Any]) -> ParsedConfig:
    translated = family_config(config, NAME, [key for key in config if _OLDER.match(key)])
    layers = config.get(BLOCK, "missing")
    if layers is not None and not is_count(layers):
        raise CheckpointError(
            f"{BLOCK} is {layers!r}; expected null (standard residuals) or a whole number of "
            "layers, at least 1."
        )
    spec = None
    if layers is not None:
        family = FAMILIES[NAME]
        spec = AttnResSpec.by_layers(family.layout(config), layers, family.epsilon(config))
    return ParsedConfig(NAME, NAME, translated, spec)


FORMAT = Format(
    NAME, BLOCKS, matches, translate, rename, stored_name, lacks_first_site=True, native=NATIVE
)
