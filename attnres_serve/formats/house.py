"""The house format: a family's config plus an ``attn_res`` dictionary, Kimi's tensor names.

    {"model_type": "attnres_qwen3", "architectures": ["AttnResQwen3ForCausalLM"],
     "attn_res": {"block_size": 4}, ...}

``block_size`` counts sublayers (1 is Full AttnRes); ``block_starts`` lists the first sublayer of
every block instead.  ``edits`` lists the edits that `convert --edit` wrote into the weights.  The
other keys of ``attn_res`` are the fields of ``AttnResSpec``.  ``qk_norm_eps`` states the epsilon of
Qwen3's per-head norms if it differs.  Every supported model can be written in this format.
"""

from difflib import get_close_matches
from typing import Any

from attnres_serve.depth.spec import EDITS, AttnResSpec, is_number
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import PREFIX
from attnres_serve.formats.family_config import family_config
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig

NAME = "house"
KEY = "attn_res"
BLOCKS = Blocks("block_size", "sublayers")


def _near(name: str) -> str:
    """The most similar names of supported families, as a part of a sentence; may be empty."""
    near = get_close_matches(name, FAMILIES)
    return f", such as {', '.join(FAMILIES[name].model_type for name in near)}" if near else ""


def matches(config: dict[str, Any]) -> bool:
    return str(config.get("model_type", "")).startswith(PREFIX)


def translate(config: dict[str, Any]) -> ParsedConfig:
    name = config["model_type"].removeprefix(PREFIX)
    if name not in FAMILIES:
        raise CheckpointError(
            f"model_type {config['model_type']!r} names the family {name!r}, which is not "
            f"supported; docs/use/families.md lists those that are{_near(name)}."
        )
    family = FAMILIES[name]
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
        with_norms = [one.model_type for one in FAMILIES.values() if one.has_head_norms]
        raise CheckpointError(
            f"qk_norm_eps is {qk_norm_eps!r}; expected a positive number, and only with "
            f"{' or '.join(with_norms)}, whose heads have a query and a key norm."
        )
    translated = family_config(config, name, (KEY, "qk_norm_eps"))
    spec = None
    if config[KEY] is not None:
        spec = AttnResSpec.from_house(config[KEY], family.layout(config), family.epsilon(config))
        edits(config)
    return ParsedConfig(NAME, name, translated, spec, qk_norm_eps)


def edits(config: dict[str, Any]) -> list[str]:
    """Descriptions of the edits in the weights; CheckpointError if one is invalid."""
    if EDITS not in (config.get(KEY) or {}):
        return []
    from attnres_serve.depth import edit_text, static_edits  # they import pydantic

    try:
        static = static_edits.from_json(config[KEY][EDITS], f"{KEY}.{EDITS}")
        return [edit_text.write(edit) for edit in static]
    except SettingError as error:
        raise CheckpointError(str(error)) from None


def rename(name: str) -> str:
    return name


def stored_name(name: str) -> str:
    return name


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name)
