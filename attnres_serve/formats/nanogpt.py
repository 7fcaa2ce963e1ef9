"""BabyLM's nanoGPT (``nanogpt`` / ``NanoGPTForCausalLM``): a Llama under nanoGPT's names, with a
gate on attention's output.

Its checkpoints contain their class as code (``auto_map``), which is not run.  The implementation
here follows its public source, ``eval/hf_nanogpt/modeling_nanogpt.py`` in YpLarryWang/nanoGPT on
GitHub: half-split rotary embedding, no scaling; the eps of the norms in config.json, that of the
key norms fixed; ``c_attn`` holds queries, keys and values one after the other.
"""

import re
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec, is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import connections
from attnres_serve.formats.format import Blocks, Format
from attnres_serve.formats.parsed_config import ParsedConfig, kept
from attnres_serve.formats.prefixes import Prefixes

NAME = "nanogpt"
BLOCKS = Blocks("attn_res_block_size", "sublayers")
OWN_KEYS = {"n_embd", "n_head", "n_layer", "block_size", "use_attn_res", "attn_res_block_size"}
KEY_NORM_EPS = 1e-5  # fixed in the class, independent of layer_norm_epsilon

_COUNTS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
_FLAGS = ("bias", "use_rmsnorm", "use_swiglu", "use_rope", "use_attn_gate", "use_attn_res")
_NUMBERS = ("swiglu_mult", "rope_theta", "layer_norm_epsilon")
# Optional flags: Transformers does not write values that equal its defaults, and older exports do
# not have all of them.
_DEFAULTS = {"tie_word_embeddings": True, "bidirectional": False, "use_static_attn_res": False}
# Other names that the class accepts for the same value.
_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "block_size",
}
# By flag: the supported value, and the meaning of the other one.
_VARIANTS = {
    "use_rmsnorm": (True, "LayerNorm in the place of RMSNorm"),
    "use_swiglu": (True, "a GELU MLP"),
    "use_rope": (True, "learned positions"),
    "bidirectional": (False, "attention to later tokens"),
    "use_static_attn_res": (False, "static routing: source weights learned without queries"),
}
_CHANGES_THE_MODEL = re.compile(
    r"^(n|use)_|attn|attention|rope|rotary|norm|logit|mask|window|scal|moe|expert|swiglu|quant"
)
_HARMLESS = ("use_cache", "use_return_dict", "use_bfloat16", "output_attentions")

_TOP = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "attn_res_qf": "model.output_attn_res_proj.weight",
    "attn_res_normf.": "model.output_attn_res_norm.",
}
_IN_LAYER = {
    "attn_res_q1": "self_attention_res_proj.weight",
    "attn_res_q2": "mlp_res_proj.weight",
    "attn_res_norm1.": "self_attention_res_norm.",
    "attn_res_norm2.": "mlp_res_norm.",
    "ln_1.": "input_layernorm.",
    "ln_2.": "post_attention_layernorm.",
    "attn.c_attn.q.": "self_attn.q_proj.",
    "attn.c_attn.k.": "self_attn.k_proj.",
    "attn.c_attn.v.": "self_attn.v_proj.",
    "attn.c_proj.": "self_attn.o_proj.",
    "attn.attn_gate.": "self_attn.attn_gate.",
    "mlp.c_gate.": "mlp.gate_proj.",
    "mlp.c_val.": "mlp.up_proj.",
    "mlp.c_proj.": "mlp.down_proj.",
    "": "",
}
_NAMES = Prefixes(
    *_TOP.items(),
    *(
        (f"transformer.h.#.{format_name}", f"model.layers.#.{name}")
        for format_name, name in _IN_LAYER.items()
    ),
)
_PART = re.compile(r"(\.attn\.c_attn)\.[qkv]\.")
rename = _NAMES.rename


def matches(config: dict[str, Any]) -> bool:
    return (
        config.get("model_type") == "nanogpt"
        and config.get("architectures") == ["NanoGPTForCausalLM"]
        and set(config) >= OWN_KEYS
    )


def translate(config: dict[str, Any]) -> ParsedConfig:
    config = _DEFAULTS | config
    _check_types(config)
    _refuse_other_models(config)
    hidden, heads = config["n_embd"], config["n_head"]
    if hidden % heads or hidden // heads % 2:
        raise CheckpointError(
            f"n_embd {hidden} is not n_head {heads} times an even number, which rotary embedding "
            "needs."
        )
    width = round(int(config["swiglu_mult"] * hidden) / 64) * 64
    if not width:
        raise CheckpointError(
            f"swiglu_mult {config['swiglu_mult']!r} and n_embd {hidden} make an MLP of size 0: the "
            "size is their product, rounded to a multiple of 64."
        )
    translated = kept(config, "tie_word_embeddings")
    translated |= {
        "hidden_size": hidden,
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": width,
        "hidden_act": "silu",
        "rms_norm_eps": config["layer_norm_epsilon"],
        "max_position_embeddings": config["block_size"],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config["rope_theta"])},
        "attention_bias": config["bias"],
        "mlp_bias": config["bias"],
    }
    name = "gated_llama" if config["use_attn_gate"] else "llama"
    return ParsedConfig(
        format=NAME,
        family=name,
        config=translated,
        spec=_spec(config, FAMILIES[name].layout(translated)),
    )


def parts(name: str) -> tuple[str, ...]:
    stem, fused, leaf = name.partition(".attn.c_attn.")
    return tuple(f"{stem}.attn.c_attn.{part}.{leaf}" for part in "qkv") if fused else (name,)


def stored_name(name: str) -> str:
    return _PART.sub(r"\1.", _NAMES.stored_name(name))


def _spec(config: dict[str, Any], layout: Layout) -> AttnResSpec | None:
    if not config["use_attn_res"]:
        return None
    size, sublayers = config["attn_res_block_size"], layout.num_sublayers
    if not is_count(size) or size % 2 or sublayers % size:
        raise CheckpointError(
            f"attn_res_block_size is {size!r}; nanoGPT counts sublayers and allows an even number "
            f"that divides all {sublayers} of them."
        )
    return AttnResSpec.uniform(layout, size, KEY_NORM_EPS)


def _check_types(config: dict[str, Any]) -> None:
    for key in _COUNTS:
        value: Any = config.get(key)
        if not is_count(value) or value >= 2**31:
            raise CheckpointError(
                f"{key} is {value!r}; config.json must state it, a whole number from 1 to 2^31 - 1."
            )
    for key in (*_FLAGS, *_DEFAULTS):
        if type(config.get(key)) is not bool:
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; config.json must state it, true or false."
            )
    for key in _NUMBERS:
        value = config.get(key)
        if not is_number(value) or not 0 < value <= 1e9:
            raise CheckpointError(
                f"{key} is {value!r}; config.json must state it, a positive number of at most 1e9."
            )


def _refuse_other_models(config: dict[str, Any]) -> None:
    """Raise for a known variant that is not supported, or an unknown setting."""
    for key, (served, other) in _VARIANTS.items():
        if config[key] is not served:
            raise CheckpointError(
                f"{key} is {config[key]!r} ({other}), which is not supported; nanoGPT checkpoints "
                f"are served with {key} {served!r}."
            )
    for alias, key in _ALIASES.items():
        if config.get(alias, config[key]) != config[key]:
            raise CheckpointError(
                f"config.json has {key}: {config[key]!r} and {alias}: {config[alias]!r}, which are "
                "two names of one setting; remove the wrong one."
            )
    known = {*OWN_KEYS, *_COUNTS, *_FLAGS, *_NUMBERS, *_DEFAULTS, *_ALIASES, *_HARMLESS}
    for key, value in config.items():
        may_change = _CHANGES_THE_MODEL.search(key) or connections.speaks_of_them(key)
        if may_change and key not in known and value not in (None, False):
            raise CheckpointError(
                f"config.json has {key}: {value!r}, which this nanoGPT does not have; a model that "
                "was trained with it would be served wrongly."
            )


FORMAT = Format(
    NAME,
    BLOCKS,
    matches,
    translate,
    rename,
    stored_name,
    fused_parts=parts,
    layer_names_of="nanoGPT",
)
