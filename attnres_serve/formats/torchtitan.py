"""The torchtitan family, which SGLang's fork serves: ``Qwen3BlockAttnResForCausalLM``.

A Qwen3 config with ``attn_res_num_blocks``: a block has floor(L / that) layers, so that there may
be more blocks than the key says.
"""

from typing import Any

from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.family_config import family_config, refuse_windows
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.prefixes import Prefixes

NAME = "torchtitan"
COUNT = "attn_res_num_blocks"
BLOCKS = Blocks(COUNT, "blocks")
ARCHITECTURE = "Qwen3BlockAttnResForCausalLM"
_NAMES = Prefixes(
    ("model.layers.#.attn_res_", "model.layers.#.self_attention_res_"),
    ("model.final_attn_res_", "model.output_attn_res_"),
)
rename, stored_name = _NAMES.rename, _NAMES.stored_name


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "qwen3" and config.get("architectures") == [ARCHITECTURE]


def translate(config: dict[str, Any]) -> ParsedConfig:
    translated = family_config(config, "qwen3", (COUNT,))
    refuse_windows(config)
    if not is_count(config.get(COUNT)):
        raise CheckpointError(
            f"{COUNT} is {config.get(COUNT)!r}; expected a whole number of blocks, at least 1."
        )
    layers = config["num_hidden_layers"]
    per_block = max(layers // config[COUNT], 1)
    layout = FAMILIES["qwen3"].layout(config)
    spec = AttnResSpec.by_layers(layout, per_block, config.get("rms_norm_eps", 1e-6))
    return ParsedConfig(NAME, "qwen3", translated, spec)


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name)
