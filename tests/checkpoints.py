"""Makers of tiny random checkpoints on disk, each servable on its own.

Every tensor is drawn from a generator seeded by its Hugging Face name, so `write_standard` and
`write_house` with one seed share all weights but the residual ones. Values are bf16 numbers
whatever dtype they are stored in. Weights are large enough for spiky depth weights, uneven
attention and clear greedy choices; `scale` multiplies the embedding and the sublayers' outputs, so
a small one brings the residual stream down to the norms' eps.
"""

import json
import math
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens"
TOKENIZER_SOURCE = GOLDENS / "fla_transformer_block"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

_SUBLAYER_SITES = ("self_attention", "mlp")
_TITLES = {"llama": "Llama", "gated_llama": "GatedLlama", "qwen2": "Qwen2", "qwen3": "Qwen3"}

_HF_OF_FLA = {
    "model.embeddings.": "model.embed_tokens.",
    "model.res_proj.": "model.output_attn_res_proj.",
    "model.res_norm.": "model.output_attn_res_norm.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".attn_res_proj.": ".self_attention_res_proj.",
    ".attn_res_norm.": ".self_attention_res_norm.",
}

_HF_OF_NANOGPT = {  # before "transformer.h." becomes "model.layers."
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    ".attn.attn_gate.": ".self_attn.attn_gate.",
    ".mlp.c_gate.": ".mlp.gate_proj.",
    ".mlp.c_val.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
    ".attn_res_q1": ".self_attention_res_proj.weight",
    ".attn_res_q2": ".mlp_res_proj.weight",
    ".attn_res_norm1.": ".self_attention_res_norm.",
    ".attn_res_norm2.": ".mlp_res_norm.",
    "attn_res_qf": "model.output_attn_res_proj.weight",
    "attn_res_normf.": "model.output_attn_res_norm.",
}


def _renamed(tensors: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """The tensors with the first matching part of each name replaced."""
    renamed = {}
    for name, tensor in tensors.items():
        old, new = next(((old, new) for old, new in table.items() if old in name), ("", ""))
        renamed[name.replace(old, new) if old else name] = tensor
    return renamed


def _draw(name: str, shape: tuple[int, ...], seed: int, scale: float, tie: bool) -> Tensor:
    """One random fp32 tensor holding bf16 values; its role is read off its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name == "model.norm.weight" and tie:
        # mixed signs, or a tied head would only ever repeat the last token
        value = 0.75 / scale * noise
    elif "norm." in name:
        value = 1 + 0.2 * noise
    elif name.endswith("_res_bias"):
        value = 1 + noise
    elif name.endswith(".bias"):
        value = 0.3 * noise * (scale if "o_proj" in name or "down_proj" in name else 1)
    elif "embed_tokens" in name:
        value = (0.5 if tie else 1.0) * scale * noise
    else:
        gain = 1.0
        if any(part in name for part in ("res_proj", "o_proj", "down_proj", "attn_gate")):
            gain = 2.0
        elif "lm_head" in name:
            gain = 3.0
        if "o_proj" in name or "down_proj" in name:
            gain *= scale
        value = gain / math.sqrt(shape[-1]) * noise
    return value.bfloat16().float()


def _base_shapes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    biases: Sequence[str],
    qk_norm: bool,
    tie: bool,
    gate: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a model with ordinary residuals."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tie:
        shapes["lm_head.weight"] = (vocab, hidden)
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    if gate:
        linears["self_attn.attn_gate"] = (heads * head_dim, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        for name, shape in linears.items():
            shapes[prefix + name + ".weight"] = shape
            if name.split(".")[1] in biases:
                shapes[prefix + name + ".bias"] = shape[:1]
    return shapes


def _residual_shapes(
    layers: int,
    hidden: int,
    final_mix: bool,
    recency_bias: bool = False,
    owners: Sequence[int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the queries and key norms, house format.

    `owners` are the sublayers that have some, all of them when None.
    """
    stems = [
        f"model.layers.{s // 2}.{_SUBLAYER_SITES[s % 2]}" for s in owners or range(2 * layers)
    ] + (["model.output_attn"] if final_mix else [])
    shapes: dict[str, tuple[int, ...]] = {}
    for stem in stems:
        shapes[stem + "_res_proj.weight"] = (1, hidden)
        shapes[stem + "_res_norm.weight"] = (hidden,)
        if recency_bias:
            shapes[stem + "_res_bias"] = ()
    return shapes


def _write(folder: Path, config: dict, tensors: dict[str, Tensor], dtype: str) -> Path:
    """A complete checkpoint in `folder`, tokenizer included."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = {name: t.to(getattr(torch, dtype)).contiguous() for name, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER_SOURCE / name, folder / name)
    return folder


def _blocks(block_size: int | None, block_starts: Sequence[int] | None) -> dict:
    if (block_size is None) == (block_starts is None):
        raise ValueError("give either block_size or block_starts")
    return {"block_size": block_size} if block_starts is None else {"block_starts": [*block_starts]}


def write_standard(
    folder: str | Path,
    base: str = "llama",
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    intermediate: int = 96,
    vocab: int = 320,
    seed: int = 0,
    scale: float = 1.0,
    tie: bool = False,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    max_positions: int = 512,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    dtype: str = "bfloat16",
) -> Path:
    """An ordinary `llama`, `qwen2` or `qwen3` checkpoint. Returns its folder.

    `gated_llama` is for `write_house`: there is no ordinary model of that name.
    """
    if base == "qwen2" and (attention_bias or head_dim * heads != hidden):
        raise ValueError("qwen2 has neither attention_bias nor a free head_dim")
    if base not in ("llama", "gated_llama") and mlp_bias:
        raise ValueError("only llama has mlp_bias")
    config = {
        "architectures": [f"{_TITLES[base]}ForCausalLM"],
        "model_type": base,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": rms_norm_eps,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": tie,
        "use_cache": True,
        "vocab_size": vocab,
    }
    if base != "qwen2":
        config |= {"head_dim": head_dim, "attention_bias": attention_bias}
    if base in ("llama", "gated_llama"):
        config["mlp_bias"] = mlp_bias
    biases = ["q_proj", "k_proj", "v_proj"] if base == "qwen2" or attention_bias else []
    biases += ["o_proj", "attn_gate"] if attention_bias else []
    biases += ["gate_proj", "up_proj", "down_proj"] if mlp_bias else []
    shapes = _base_shapes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        biases=biases,
        qk_norm=base == "qwen3",
        tie=tie,
        gate=base == "gated_llama",
    )
    tensors = {name: _draw(name, shape, seed, scale, tie) for name, shape in shapes.items()}
    return _write(Path(folder), config, tensors, dtype)


def _add_residual(folder: Path, attn_res: dict, tensors: dict[str, Tensor], source: Path) -> Path:
    """The ordinary checkpoint `source` as a house checkpoint with the residual `tensors`."""
    config = json.loads((source / "config.json").read_text())
    base = config["model_type"]
    config["model_type"] = f"attnres_{base}"
    config["architectures"] = [f"AttnRes{_TITLES[base]}ForCausalLM"]
    config["attn_res"] = attn_res
    merged = load_file(source / "model.safetensors") | tensors
    return _write(folder, config, merged, config["dtype"])


def write_house(
    folder: str | Path,
    base: str = "llama",
    *,
    block_size: int | None = None,
    block_starts: Sequence[int] | None = None,
    final_mix: bool | None = None,
    key_norm_eps: float | None = None,
    attn_res: dict | None = None,
    qk_norm_eps: float | None = None,
    zero_queries: bool = False,
    **options,
) -> Path:
    """A house-format checkpoint; `options` are those of `write_standard`. Returns its folder.

    `final_mix` and `key_norm_eps` are left out of the config when None; `attn_res` holds further
    keys of its dictionary of that name.
    """
    given = {"final_mix": final_mix, "key_norm_eps": key_norm_eps}
    attn_res = _blocks(block_size, block_starts) | (attn_res or {})
    attn_res |= {key: value for key, value in given.items() if value is not None}
    folder = write_standard(folder, base, **options)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    owners = {
        None: range(2 * layers),
        "layer": range(0, 2 * layers, 2),
        "block": block_starts or range(0, 2 * layers, block_size or 1),
    }[attn_res.get("shared_queries")]
    shapes = _residual_shapes(
        layers,
        config["hidden_size"],
        attn_res.get("final_mix", True),
        attn_res.get("recency_bias", False),
        owners,
    )
    seed = options.get("seed", 0)
    tensors = {name: _draw(name, shape, seed, 1.0, False) for name, shape in shapes.items()}
    if zero_queries:
        tensors |= {name: torch.zeros(shapes[name]) for name in tensors if "_res_proj" in name}
    _add_residual(folder, attn_res, tensors, folder)
    if qk_norm_eps is not None:
        config = json.loads((folder / "config.json").read_text()) | {"qk_norm_eps": qk_norm_eps}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _as_format(folder: Path, config: dict, names: dict[str, str]) -> Path:
    """The house checkpoint in `folder` with other tensor names and other keys of its config."""
    own = json.loads((folder / "config.json").read_text())
    del own["attn_res"]
    tensors = _renamed(load_file(folder / "model.safetensors"), names)
    return _write(folder, own | config, tensors, own["dtype"])


def write_kimi_names(
    folder: str | Path, *, block_layers: int | None, output_route: bool = True, **options
) -> Path:
    """A `qwen3_ar` checkpoint; `block_layers` None has ordinary residuals. Returns its folder."""
    config = {
        "architectures": ["Qwen3ARForCausalLM"],
        "model_type": "qwen3_ar",
        "attn_res_block_size": block_layers,
        "attn_res_output_route": output_route,
        "auto_map": {"AutoConfig": "configuration_qwen3_ar.Qwen3ARConfig"},
    }
    folder = Path(folder)
    if block_layers is None:
        write_standard(folder, "qwen3", **options)
        own = json.loads((folder / "config.json").read_text())
        return _write(folder, own | config, load_file(folder / "model.safetensors"), own["dtype"])
    write_house(folder, "qwen3", block_size=2 * block_layers, final_mix=output_route, **options)
    return _as_format(folder, config, {})


_MODE_NAMES = {
    ".self_attention_res_": ".attn_res_",
    "model.output_attn_res_": "model.final_res_",
}
_TITAN_NAMES = _MODE_NAMES | {"model.output_attn_res_": "model.final_attn_res_"}


def write_mode(
    folder: str | Path,
    base: str = "qwen3",
    *,
    mode: str = "block",
    num_blocks: int = 2,
    cumulative: bool = False,
    layers: int = 3,
    **options,
) -> Path:
    """A `qwen3_attnres` or `llama_attnres` checkpoint. Returns its folder.

    `cumulative` is open-attnres, with recency biases; otherwise it is delta-attnres.
    """
    own_key = {"attnres_recency_bias_init": 3.0} if cumulative else {"attnres_num_heads": 8}
    config = {
        "architectures": [f"{_TITLES[base]}AttnResForCausalLM"],
        "model_type": f"{base}_attnres",
        "attnres_gate_type": "bias",
        "attnres_mode": mode,
        "attnres_num_blocks": num_blocks,
        **own_key,
    }
    if not cumulative:
        config["attnres_use_null_source"] = False
    size = 1 if mode == "full" else 2 * math.ceil(layers / num_blocks)
    spec = {"cumulative": True, "recency_bias": True, "final_mix": False} if cumulative else {}
    folder = Path(folder)
    write_house(folder, base, block_size=size, attn_res=spec, layers=layers, **options)
    return _as_format(folder, config, _MODE_NAMES)


def write_titan(folder: str | Path, *, num_blocks: int = 2, layers: int = 3, **options) -> Path:
    """A `Qwen3BlockAttnResForCausalLM` checkpoint. Returns its folder."""
    config = {
        "architectures": ["Qwen3BlockAttnResForCausalLM"],
        "model_type": "qwen3",
        "attn_res_num_blocks": num_blocks,
    }
    size = 2 * max(layers // num_blocks, 1)
    folder = Path(folder)
    write_house(folder, "qwen3", block_size=size, layers=layers, **options)
    return _as_format(folder, config, _TITAN_NAMES)


def add_zero_queries(
    src: str | Path,
    dst: str | Path,
    block_size: int | None = None,
    *,
    block_starts: Sequence[int] | None = None,
) -> Path:
    """An ordinary checkpoint rewritten with zero queries and unit key norms.

    Both compute the same function, up to the norms' eps. Returns `dst`.
    """
    src = Path(src)
    config = json.loads((src / "config.json").read_text())
    shapes = _residual_shapes(config["num_hidden_layers"], config["hidden_size"], True)
    tensors = {
        name: torch.zeros(shape) if "_res_proj" in name else torch.ones(shape)
        for name, shape in shapes.items()
    }
    return _add_residual(Path(dst), _blocks(block_size, block_starts), tensors, src)


def write_fla(
    folder: str | Path,
    *,
    layers: int = 3,
    block_size: int | None = 4,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int | None = 1,
    intermediate: int | None = 96,
    hidden_ratio: int | None = 4,
    vocab: int = 320,
    seed: int = 0,
    scale: float = 1.0,
    tie: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    window_size: int | None = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    max_positions: int = 512,
    zero_queries: bool = False,
    dtype: str = "bfloat16",
) -> Path:
    """An FLA `transformer` checkpoint; `block_size` None has ordinary residuals.

    `kv_heads` and `intermediate` None are written as null. Returns the folder.
    """
    config = {
        "architectures": ["TransformerForCausalLM"],
        "model_type": "transformer",
        "attnres_block_size": block_size,
        "bos_token_id": 1,
        "elementwise_affine": True,
        "eos_token_id": 2,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": False,
        "fuse_norm": False,
        "fuse_swiglu": False,
        "hidden_act": "swish",
        "hidden_ratio": hidden_ratio,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "norm_eps": norm_eps,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "num_kv_heads": kv_heads,
        "pad_token_id": None,
        "qk_norm": qk_norm,
        "qkv_bias": qkv_bias,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tie,
        "use_cache": True,
        "use_l2warp": False,
        "vocab_size": vocab,
        "window_size": window_size,
    }
    if intermediate is None:
        intermediate = -(-int(hidden * (hidden_ratio or 4) * 2 / 3) // 256) * 256
    shapes = _base_shapes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        biases=["q_proj", "k_proj", "v_proj"] if qkv_bias else [],
        qk_norm=qk_norm,
        tie=tie,
    )
    if block_size is not None:
        shapes |= _residual_shapes(layers, hidden, True)
    tensors = {name: _draw(name, shape, seed, scale, tie) for name, shape in shapes.items()}
    if zero_queries:
        tensors |= {name: torch.zeros(shapes[name]) for name in tensors if "_res_proj" in name}
    tensors = _renamed(tensors, {hf: fla for fla, hf in _HF_OF_FLA.items()})
    return _write(Path(folder), config, tensors, dtype)


def house_copy_of_fla(src: str | Path, dst: str | Path) -> Path:
    """An FLA checkpoint rewritten in the house format, or a ValueError if it cannot be exact.

    Without per-head norms it becomes `attnres_llama`, with biases `attnres_qwen2`, with per-head
    norms `attnres_qwen3`. Returns `dst`.
    """
    src = Path(src)
    fla = json.loads((src / "config.json").read_text())
    eps, heads, hidden = fla["norm_eps"], fla["num_heads"], fla["hidden_size"]
    if fla["attnres_block_size"] is None or fla["window_size"] is not None:
        raise ValueError("the house format has neither ordinary residuals nor a window")
    if fla["qk_norm"] and eps != 1e-5:
        raise ValueError(f"FLA's per-head norms have eps 1e-5, those of qwen3 would have {eps}")
    if fla["qk_norm"] and fla["qkv_bias"]:
        raise ValueError("no base family has per-head norms and biases on q, k, v alone")
    base = "qwen3" if fla["qk_norm"] else "qwen2" if fla["qkv_bias"] else "llama"
    tensors = _renamed(load_file(src / "model.safetensors"), _HF_OF_FLA)
    config = {
        "architectures": [f"AttnRes{_TITLES[base]}ForCausalLM"],
        "model_type": f"attnres_{base}",
        "attn_res": {"block_size": fla["attnres_block_size"]},
        "hidden_act": "silu",
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": fla["num_kv_heads"] or heads,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_theta": fla["rope_theta"], "rope_type": "default"},
    }
    same = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    same += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "initializer_range")
    config |= {key: fla[key] for key in same}
    if base != "qwen2":
        config |= {"head_dim": hidden // heads, "attention_bias": False}
    if base == "llama":
        config["mlp_bias"] = False
    return _write(Path(dst), config, tensors, fla["dtype"])


def write_nanogpt(
    folder: str | Path,
    *,
    layers: int = 4,
    block_size: int | None = 4,
    hidden: int = 64,
    heads: int = 2,
    swiglu_mult: float = 8 / 3,
    vocab: int = 320,
    context: int = 512,
    gate: bool = True,
    bias: bool = False,
    seed: int = 0,
    scale: float = 1.0,
    tie: bool = True,
    eps: float = 1e-5,
    rope_theta: float = 10000.0,
    zero_queries: bool = False,
    dtype: str = "bfloat16",
) -> Path:
    """A BabyLM `nanogpt` checkpoint; `block_size` None has ordinary residuals. Returns the folder.

    `tie` True is left out of the config, as Transformers does when it writes one.
    """
    classes = {"AutoConfig": "NanoGPTConfig", "AutoModelForCausalLM": "NanoGPTForCausalLM"}
    config = {
        "architectures": ["NanoGPTForCausalLM"],
        "auto_map": {auto: f"modeling_nanogpt.{name}" for auto, name in classes.items()},
        "model_type": "nanogpt",
        "attn_res_block_size": block_size or 2,
        "bias": bias,
        "bidirectional": False,
        "block_size": context,
        "bos_token_id": 1,
        "dropout": 0.0,
        "eos_token_id": 2,
        "layer_norm_epsilon": eps,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "pad_token_id": 0,
        "rope_theta": rope_theta,
        "swiglu_mult": swiglu_mult,
        "use_attn_gate": gate,
        "use_attn_res": block_size is not None,
        "use_rmsnorm": True,
        "use_rope": True,
        "use_swiglu": True,
        "vocab_size": vocab,
    }
    if not tie:
        config["tie_word_embeddings"] = False
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "attn_gate")
    shapes = _base_shapes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=64 * round(int(swiglu_mult * hidden) / 64),
        vocab=vocab,
        biases=(*linears, "gate_proj", "up_proj", "down_proj") if bias else (),
        qk_norm=False,
        tie=tie,
        gate=gate,
    )
    if block_size is not None:
        shapes |= _residual_shapes(layers, hidden, True)
    tensors = {name: _draw(name, shape, seed, scale, tie) for name, shape in shapes.items()}
    for name in shapes:
        if "_res_proj" in name:
            tensors[name] = torch.zeros(hidden) if zero_queries else tensors[name].flatten()
    tensors = _renamed(tensors, {hf: own for own, hf in _HF_OF_NANOGPT.items()})
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        for leaf in ("weight", "bias") if bias else ("weight",):
            qkv = [tensors.pop(f"{stem}self_attn.{part}_proj.{leaf}") for part in "qkv"]
            tensors[f"{stem}attn.c_attn.{leaf}"] = torch.cat(qkv)
    tensors = _renamed(tensors, {"model.layers.": "transformer.h."})
    return _write(Path(folder), config, tensors, dtype)


def house_copy_of_nanogpt(src: str | Path, dst: str | Path) -> Path:
    """A nanoGPT checkpoint rewritten in the house format. Returns `dst`."""
    src = Path(src)
    own = json.loads((src / "config.json").read_text())
    tensors = {}
    fused = load_file(src / "model.safetensors")
    for name, tensor in _renamed(fused, {"transformer.h.": "model.layers."}).items():
        stem, found, leaf = name.partition(".attn.c_attn.")
        for part, value in zip("qkv", tensor.chunk(3), strict=True) if found else ():
            tensors[f"{stem}.self_attn.{part}_proj.{leaf}"] = value
        if not found:
            tensors[name] = tensor
    tensors = _renamed(tensors, _HF_OF_NANOGPT)
    base = "gated_llama" if own["use_attn_gate"] else "llama"
    config = {
        "architectures": [f"AttnRes{_TITLES[base]}ForCausalLM"],
        "model_type": f"attnres_{base}",
        "attn_res": {"block_size": own["attn_res_block_size"], "key_norm_eps": 1e-5},
        "attention_bias": own["bias"],
        "head_dim": own["n_embd"] // own["n_head"],
        "hidden_act": "silu",
        "hidden_size": own["n_embd"],
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "max_position_embeddings": own["block_size"],
        "mlp_bias": own["bias"],
        "num_attention_heads": own["n_head"],
        "num_hidden_layers": own["n_layer"],
        "num_key_value_heads": own["n_head"],
        "rms_norm_eps": own["layer_norm_epsilon"],
        "rope_parameters": {"rope_theta": own["rope_theta"], "rope_type": "default"},
        "tie_word_embeddings": own.get("tie_word_embeddings", True),
    }
    config |= {key: own[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    for name in tensors:
        if "_res_proj" in name:
            tensors[name] = tensors[name][None]
    return _write(Path(dst), config, tensors, own["dtype"])


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def quantised(folder: str | Path, source: str | Path, ignore: Sequence[str] = ()) -> Path:
    """A copy with INT8 weights (one scale per row) and INT8 activations, as saved by
    compressed-tensors. Returns its folder.

    `ignore` names linear layers that stay as they are, beside the head.
    """
    folder, tensors = Path(folder), {}
    shutil.copytree(source, folder)
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj") or "res_proj" in stem or stem in ignore:
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {
        "targets": ["Linear"],
        "weights": INT8 | {"strategy": "channel", "dynamic": False},
        "input_activations": INT8 | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float tensors that INT8 ones stand for."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"] if f"{name}_scale" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
