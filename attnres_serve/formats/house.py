"""The house format: a base family's config plus an ``attn_res`` dictionary, Kimi's tensor names.

    {"model_type": "attnres_qwen3", "architectures": ["AttnResQwen3ForCausalLM"],
     "attn_res": {"block_size": 4}, ...}

``block_size`` counts sublayers (1 is Full AttnRes); ``block_starts`` lists the first sublayer of
every block instead.  ``edits`` lists what `convert --edit` wrote into the
weights.  The other keys of ``attn_res`` are the fields of ``AttnResSpec``.  Where
Qwen3's per-head norms have an epsilon of their own, ``qk_norm_eps`` states it.  Every model that is
served, of any family, can be written in this format.
"""

from difflib import get_close_matches
from typing import Any

from attnres_serve.depth.spec import EDITS, AttnResSpec, is_number
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import PREFIX
from attnres_serve.formats.base_config import base_config
from attnres_serve.formats.format import Blocks
from attnres_serve.formats.parsed_config import ParsedConfig

NAME = "house"
KEY = "attn_res"
BLOCKS = Blocks("block_size", "sublayers")


def _near(base: str) -> str:
    """The supported families whose names are nearest, as a part of a sentence; or empty."""
    near = get_close_matches(base, FAMILIES)
    return f", such as {', '.join(FAMILIES[name].model_type for name in near)}" if near else ""


def matches(config: dict[str, Any]) -> bool:
    return str(config.get("model_type", "")).startswith(PREFIX)


def translate(config: dict[str, Any]) -> ParsedConfig:
    base = config["model_type"].removeprefix(PREFIX)
    if base not in FAMILIES:
        raise CheckpointError(
            f"model_type {config['model_type']!r} names the base family {base!r}, which is not "
            f"supported; docs/use/families.md lists those that are{_near(base)}."
        )
    family = FAMILIES[base]
    expected = family.architecture
    if config.get("architectures") != [expected]:
        raise CheckpointError(
            f"architectures is {config.get('architectures')!r}; model_type "
            f"{config['model_type']!r} goes with [{expected!r}]."
        )
    if KEY not in config:
        raise CheckpointError(
            f"config.json has model_type {config['model_type']!r} but no attn_res; add for "
            'example {"block_size": 4}, counted in sublayers.'
        )
    if (qk_norm_eps := config.get("qk_norm_eps")) is not None and (
        not family.has_head_norms or not is_number(qk_norm_eps) or qk_norm_eps <= 0
    ):
        with_norms = [family.model_type for family in FAMILIES.values() if family.has_head_norms]
        raise CheckpointError(
            f"qk_norm_eps is {qk_norm_eps!r}; expected a positive number, and only with "
            f"{' or '.join(with_norms)}, whose heads have a query and a key norm."
        )
    translated = base_config(config, base, (KEY, "qk_norm_eps"))
    spec = None
    if config[KEY] is not None:
        spec = AttnResSpec.from_house(config[KEY], family.layout(config), family.epsilon(config))
        edits(config)
    return ParsedConfig(NAME, base, translated, spec, qk_norm_eps)


def edits(config: dict[str, Any]) -> list[str]:
    """The edits, in words, that were written into the weights; CheckpointError if they are none."""
    if EDITS not in (config.get(KEY) or {}):
        return []
    from attnres_serve.depth import edit_words, static_edits  # they import pydantic

    try:
        found = static_edits.from_json(config[KEY][EDITS], f"{KEY}.{EDITS}")
        return [edit_words.write(edit) for edit in found]
    except SettingError as error:
        raise CheckpointError(str(error)) from None


def rename(name: str) -> str:
    return name


def own_name(name: str) -> str:
    return name
