"""Depth-Attention's baseline: a Llama whose ``baseline_mode`` says AttnRes (arXiv 2606.05014).

The partial sum begins with the embedding and is never reset.  After a layer's MLP, a copy of it
becomes a source as soon as ``attnres_block_size`` sublayers have run since the last copy: odd sizes
are rounded up to whole layers.  The same holds for the last layer, whose copy the final site reads
in addition to the sum.  Every site has a recency bias.
"""

from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES, normed_llama
from attnres_serve.formats.family_config import family_config
from attnres_serve.formats.format import UNREAD, Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.prefixes import Prefixes

NAME = "baseline_attnres"
MODES = ("baseline_mode", "residual_baseline")  # the key, and its older name
_MEANINGS = {
    *("attnres", "block_attnres", "block-attnres"),
    *("attention_residual", "attention-residual"),
}
# Keys of Depth-Attention, another model of the same code, which ``strangers`` refuses if it is on:
# its switches, and its settings, which that code writes into the config.json of every model.
SWITCH, PATTERN, MODE = "use_depth_attention", "cross_layer_pattern", "cross_layer_mode"
SETTINGS = (
    *("depth_attention_stride", "depth_attention_recent_window", MODE),
    *("depth_softmax_stride", "depth_recent_window"),  # older names
)
# Initial biases, and whether Depth-Attention may run, which a baseline rules out.
_IDLE = ("attnres_recency_bias_init", "recurrent_model")
BLOCK, USUAL = "attnres_block_size", 12
BLOCKS = Blocks(BLOCK, "sublayers")
_UNREAD = "lm_head_layernorm.weight"  # its code saves it and never reads it
_SITES = {
    "model.layers.#.attnres_attn_aggregator.": "model.layers.#.self_attention_res_",
    "model.layers.#.attnres_mlp_aggregator.": "model.layers.#.mlp_res_",
    "model.attnres_final_aggregator.": "model.output_attn_res_",
}
_LEAVES = {"pseudo_query": "proj.weight", "norm.weight": "norm.weight", "recency_bias": "bias"}
_NAMES = Prefixes(
    (_UNREAD, UNREAD + _UNREAD),
    *(
        (format_site + format_leaf, site + leaf)
        for format_site, site in _SITES.items()
        for format_leaf, leaf in _LEAVES.items()
    ),
)
rename, stored_name = _NAMES.rename, _NAMES.stored_name


def matches(config: dict[str, Any]) -> bool:
    return (
        config.get("model_type") == "llama"
        and config.get("architectures") == ["LlamaForCausalLM"]
        and any(means_attnres(config.get(key)) for key in MODES)
    )


def means_attnres(mode: Any) -> bool:
    """Whether a value of one of ``MODES`` is a name of AttnRes."""
    return isinstance(mode, str) and mode.strip().lower() in _MEANINGS


def translate(config: dict[str, Any]) -> ParsedConfig:
    stated = {key: config[key] for key in MODES if _is_stated(config.get(key))}
    if not all(map(means_attnres, stated.values())):
        modes = " and ".join(f"{key} {value!r}" for key, value in stated.items())
        raise CheckpointError(
            f"config.json has {modes}, which are two names of one value; remove the wrong one."
        )
    config = config | {key: _flag(config[key]) for key in normed_llama.DEFAULTS if key in config}
    normed_llama.flags(NAME, config)
    options = normed_llama.DEFAULTS | config
    is_normed = options[normed_llama.NORMS] or options[normed_llama.SCALE]
    name = "normed_llama" if is_normed else "llama"
    known = (*MODES, SWITCH, PATTERN, *SETTINGS, *_IDLE, BLOCK, *normed_llama.DEFAULTS)
    translated, family = family_config(config, name, known), FAMILIES[name]
    size = _size(config.get(BLOCK))
    layout = family.layout(config)
    spec = AttnResSpec(
        layout,
        _starts(layout, size),
        family.epsilon(config),
        cumulative=True,
        recency_bias=True,
    )
    return ParsedConfig(NAME, name, translated, spec)


def _is_stated(mode: Any) -> bool:
    """Whether the training code acts on a value of one of ``MODES``."""
    return bool(mode) and str(mode).strip().lower() not in ("", "none", "null")


def _flag(value: Any) -> Any:
    """A value as the training code's ``bool`` reads it; strings stay, to be refused later."""
    return value if isinstance(value, str) else bool(value)


def _size(stated: Any) -> int:
    """The sublayers of a block, read like the training code's ``int``."""
    if stated is None:
        return USUAL
    size = int(stated) if isinstance(stated, str) and stated.strip().isdecimal() else stated
    size = int(size) if isinstance(size, float) and size.is_integer() else size
    if not is_count(size):
        raise CheckpointError(
            f"{BLOCK} is {stated!r}; expected a whole number of sublayers, at least 1."
        )
    return int(size)


def _starts(layout: Layout, size: int) -> tuple[int, ...]:
    """The first sublayers of blocks; one after the last sublayer if a block ends with it."""
    per_block = -(-size // 2)
    starts = layout.layer_starts[::per_block]
    ends_with_a_block = layout.num_layers % per_block == 0
    return (*starts, layout.num_sublayers) if ends_with_a_block else starts


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name)
