"""The ``Spec`` of a config.json, format by format.

Supported: the house format (`attnres_llama`, `attnres_gated_llama`, `attnres_normed_llama`,
`attnres_mistral`, `attnres_qwen2`, `attnres_qwen3`), `llama` with `baseline_mode`, `transformer` of
FLA, `nanogpt` of BabyLM, `qwen3_ar`,
`qwen3_attnres` and `llama_attnres` (distinguished by the tensors), `qwen3` with the architecture
Qwen3BlockAttnResForCausalLM and, with ordinary residuals, `llama`, `mistral`, `qwen2`, `qwen3`.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attnres_serve.verify.oracle.names import (
    BASELINE_NAMES,
    DELTA_NAMES,
    FLA_NAMES,
    HF_NAMES,
    HOUSE_NAMES,
    NANOGPT_LEAVES,
    NANOGPT_NAMES,
    OPEN_NAMES,
    TITAN_NAMES,
)
from attnres_serve.verify.oracle.rotary import rope_of
from attnres_serve.verify.oracle.spec import (
    Spec,
    alike,
    check_starts,
    starts_by_layers,
    starts_of,
)
from attnres_serve.verify.oracle.sublayers import MLP, Attention, GatedAttention

Config = dict[str, Any]
BASES = ("gated_llama", "llama", "mistral", "normed_llama", "qwen2", "qwen3")
DECODER = ("attention", "mlp")  # the sublayers of every layer


def _fla_spec(config: Config) -> Spec:
    hidden, heads = config["hidden_size"], config["num_heads"]
    if config.get("hidden_act", "swish") != "swish":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported")
    intermediate = config.get("intermediate_size")
    if intermediate is None:
        two_thirds = int(hidden * (config.get("hidden_ratio") or 4) * 2 / 3)
        intermediate = math.ceil(two_thirds / 256) * 256
    block_size = config.get("attnres_block_size")
    eps = config.get("norm_eps", 1e-6)
    layout = alike(config["num_hidden_layers"], DECODER)
    attention = Attention(
        heads=heads,
        kv_heads=config.get("num_kv_heads") or heads,
        head_dim=hidden // heads,
        rope=rope_of(config),
        window=config.get("window_size"),
        qk_norm_eps=1e-5 if config.get("qk_norm") else None,
        qkv_bias=bool(config.get("qkv_bias")),
    )
    return Spec(
        names=FLA_NAMES,
        layout=layout,
        sublayers={"attention": attention, "mlp": MLP(intermediate)},
        hidden=hidden,
        vocab=config["vocab_size"],
        eps=eps,
        tied=config.get("tie_word_embeddings", False),
        block_starts=None if block_size is None else starts_of(block_size, len(layout)),
        key_norm_eps=eps,
    )


def _nanogpt_spec(config: Config) -> Spec:
    hidden, heads = config["n_embd"], config["n_head"]
    layout = alike(config["n_layer"], DECODER)
    kind = [config[key] for key in ("use_rmsnorm", "use_swiglu", "use_rope")]
    if kind != [True, True, True] or config.get("bidirectional"):
        raise ValueError("only RMSNorm, SwiGLU, rotary embedding and causal attention")
    bias = bool(config["bias"])
    attention = (GatedAttention if config["use_attn_gate"] else Attention)(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        rope=rope_of({"rope_theta": config["rope_theta"]}),
        qkv_bias=bias,
        output_bias=bias,
        fused_qkv=True,
    )
    mlp = MLP(64 * round(int(config["swiglu_mult"] * hidden) / 64), bias)
    size = config["attn_res_block_size"] if config["use_attn_res"] else None
    return Spec(
        names=NANOGPT_NAMES,
        layout=layout,
        sublayers={"attention": attention, "mlp": mlp},
        leaves=NANOGPT_LEAVES,
        hidden=hidden,
        vocab=config["vocab_size"],
        eps=config["layer_norm_epsilon"],
        tied=config.get("tie_word_embeddings", True),
        block_starts=None if size is None else starts_of(size, len(layout)),
        key_norm_eps=1e-5,
    )


def _hf_spec(config: Config, base: str) -> Spec:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported")
    bias = bool(config.get("attention_bias")) and base != "mistral"
    head_dim = config.get("head_dim") if base != "qwen2" else None
    eps = config.get("rms_norm_eps", 1e-6)
    layout = alike(config["num_hidden_layers"], DECODER)
    is_llama = base in ("gated_llama", "llama", "normed_llama")
    has_norms = base == "qwen3" or (base == "normed_llama" and config.get("use_qk_norm", True))
    is_scaled = base == "normed_llama" and config.get("scale_embeds", False)
    attention = (GatedAttention if base == "gated_llama" else Attention)(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or (128 if base == "qwen3" else hidden // heads),
        rope=rope_of(config),
        window=_window(config, base),
        qk_norm_eps=eps if has_norms else None,
        norms_rotated_keys=base == "normed_llama",
        qkv_bias=bias or base == "qwen2",
        output_bias=bias and base != "qwen2",
    )
    mlp_bias = is_llama and bool(config.get("mlp_bias"))
    return Spec(
        names=HF_NAMES,
        layout=layout,
        sublayers={"attention": attention, "mlp": MLP(config["intermediate_size"], mlp_bias)},
        hidden=hidden,
        vocab=config["vocab_size"],
        eps=eps,
        tied=config.get("tie_word_embeddings", False),
        embedding_scale=math.sqrt(hidden) if is_scaled else 1.0,
    )


def _window(config: Config, base: str) -> int | None:
    """The sliding window of every layer, or None."""
    types = set(config.get("layer_types") or ())
    window = config.get("sliding_window", 4096 if base in ("mistral", "qwen2", "qwen3") else None)
    if base.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    right = "full_attention" if window is None else "sliding_attention"
    if types - {right} or (window is not None and base != "mistral" and not types):
        raise ValueError("sliding windows are only supported on every layer")
    return window


def _house_spec(config: Config, base: str) -> Spec:
    spec = _hf_spec(config, base)
    spec.names = HOUSE_NAMES
    add_depth(spec, config["attn_res"])
    attention = spec.sublayers["attention"]
    assert isinstance(attention, Attention)
    spec.sublayers["attention"] = replace(
        attention,
        qk_norm_eps=config.get("qk_norm_eps", attention.qk_norm_eps),
        output_bias=attention.output_bias and base != "qwen3",
    )
    return spec


def add_depth(spec: Spec, options: Config) -> None:
    """Add the blocks of the house format's dictionary `attn_res` to a model without blocks."""
    flags = ("final_mix", "cumulative", "recency_bias", "source_bias")
    free = (*flags, "logit_scale", "shared_queries")
    unknown = set(options) - {"block_size", "block_starts", "key_norm_eps", "edits", *free}
    if unknown or ("block_size" in options) == ("block_starts" in options):
        raise ValueError(f"bad attn_res options {options}")
    if "block_size" in options:
        spec.block_starts = starts_of(options["block_size"], spec.final)
    else:
        closes = options.get("cumulative", False) and options.get("final_mix", True)
        spec.block_starts = check_starts(options["block_starts"], spec.final, closes)
    spec.key_norm_eps = options.get("key_norm_eps", spec.eps)
    for key in free:
        setattr(spec, key, options.get(key, getattr(spec, key)))
    if spec.source_bias and (spec.recency_bias or spec.shared_queries):
        raise ValueError(f"bad attn_res options {options}")


def _layers_spec(config: Config, base: str, names: dict[str, str], per_block: int | None) -> Spec:
    """A model on `base` whose blocks are `per_block` layers; None: every sublayer is one."""
    spec = _hf_spec(config, base)
    spec.names, spec.key_norm_eps = names, spec.eps
    layout = spec.layout
    spec.block_starts = (
        starts_by_layers(per_block, layout) if per_block else starts_of(1, spec.final)
    )
    return spec


def _kimi_names_spec(config: Config) -> Spec:
    if config["attn_res_block_size"] is None:
        return _hf_spec(config, "qwen3")
    spec = _layers_spec(config, "qwen3", HOUSE_NAMES, config["attn_res_block_size"])
    spec.final_mix = config.get("attn_res_output_route", True)
    return spec


def _mode_spec(config: Config, base: str, tensors: Iterable[str]) -> Spec:
    """`qwen3_attnres` and `llama_attnres`: cumulative if there are recency biases."""
    mode, blocks = config["attnres_mode"], config.get("attnres_num_blocks")
    if mode not in ("block", "full") or config.get("attnres_gate_type", "bias") != "bias":
        raise ValueError(f"attnres_mode {mode!r} with this gate is not supported")
    if config.get("attnres_use_null_source"):
        raise ValueError("a null source is not supported")
    per_block = math.ceil(config["num_hidden_layers"] / blocks) if mode == "block" else None
    biased = any(name.endswith("_res_bias") for name in tensors)
    spec = _layers_spec(config, base, OPEN_NAMES if biased else DELTA_NAMES, per_block)
    spec.cumulative = spec.recency_bias = biased
    spec.final_mix = not biased
    return spec


def _baseline_mode(config: Config) -> str:
    """`baseline_mode`, or its older name; empty without either."""
    for key in ("baseline_mode", "residual_baseline"):
        mode = str(config.get(key) or "").strip().lower()
        if mode not in ("", "none", "null"):
            return mode
    return ""


def _baseline_spec(config: Config) -> Spec:
    """Snapshots of one cumulative sum after the MLPs that complete enough sublayers."""
    mode = _baseline_mode(config).replace("-", "_")
    if mode not in ("attnres", "block_attnres", "attention_residual"):
        raise ValueError(f"baseline_mode {mode!r} is not supported")
    spec = _hf_spec(config, "normed_llama")
    stated = config.get("attnres_block_size")
    size = 12 if stated is None else int(stated)
    starts, since = [0], 0
    for site in range(1, spec.final + 1):
        since += 1
        if spec.layout[site - 1].kind == "mlp" and since >= size:
            starts.append(site)
            since = 0
    spec.names, spec.block_starts, spec.key_norm_eps = BASELINE_NAMES, tuple(starts), spec.eps
    spec.cumulative = spec.recency_bias = True
    spec.unread = ("lm_head_layernorm.weight",)
    return spec


def _titan_spec(config: Config) -> Spec:
    per_block = max(config["num_hidden_layers"] // config["attn_res_num_blocks"], 1)
    return _layers_spec(config, "qwen3", TITAN_NAMES, per_block)


def spec_of(config: Config, tensors: Iterable[str]) -> Spec:
    """The spec of a config.json, which some formats complete by the names of tensors."""
    kind, architectures = config["model_type"], config.get("architectures")
    if kind == "transformer":
        return _fla_spec(config)
    if kind == "nanogpt":
        return _nanogpt_spec(config)
    if kind == "qwen3_ar":
        return _kimi_names_spec(config)
    if kind in ("qwen3_attnres", "llama_attnres"):
        return _mode_spec(config, kind.removesuffix("_attnres"), tensors)
    if kind == "qwen3" and architectures == ["Qwen3BlockAttnResForCausalLM"]:
        return _titan_spec(config)
    if kind == "llama" and _baseline_mode(config):
        return _baseline_spec(config)
    if kind in ("llama", "mistral", "qwen2", "qwen3"):
        return _hf_spec(config, kind)
    house, _, base = kind.rpartition("attnres_")
    if not house and kind != base and base in BASES:
        return _house_spec(config, base)
    raise ValueError(f"model_type {kind!r} is not supported")
