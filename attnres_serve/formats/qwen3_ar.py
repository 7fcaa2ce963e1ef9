"""Qwen3AR: Kimi's tensor names on Qwen3, and Kimi's key, which counts layers.

``attn_res_block_size`` is a number of transformer layers, null for standard residuals;
``attn_res_output_route`` false means no final mix.
"""

from typing import Any

from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.family_config import family_config, refuse_windows
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig

NAME = "qwen3_ar"
KEYS = ("attn_res_block_size", "attn_res_output_route")
BLOCKS = Blocks(KEYS[0], "layers")


def matches(config: dict[str, Any]) -> bool:
    return config.get("model_type") == NAME and config.get("architectures") == [
        "Qwen3ARForCausalLM"
    ]


def translate(config: dict[str, Any]) -> ParsedConfig:
    translated = family_config(config, "qwen3", KEYS)
    refuse_windows(config)
    layers, final_mix = config.get(KEYS[0], "missing"), config.get(KEYS[1], True)
    if layers is not None and not is_count(layers):
        raise CheckpointError(
            f"attn_res_block_size is {layers!r}; expected null (standard residuals) or a whole "
            "number of layers, at least 1."
        )
    if type(final_mix) is not bool:
        raise CheckpointError(f"attn_res_output_route is {final_mix!r}; expected true or false.")
    spec = None
    if layers is not None:
        eps = config.get("rms_norm_eps", 1e-6)
        layout = FAMILIES["qwen3"].layout(config)
        spec = AttnResSpec.by_layers(layout, layers, eps, final_mix)
    return ParsedConfig(NAME, "qwen3", translated, spec)


def rename(name: str) -> str:
    return name


def stored_name(name: str) -> str:
    return name


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name)
