"""Ordinary checkpoints, and those of the house format."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from facts import FACTS, QKV
from safetensors.torch import load_file

from checkpoints.hugging_face import write_tiny
from checkpoints.tensors import base_shapes, draw, residual_shapes, write

# Of depth attention, all at once.
EVERY_OPTION = {
    "cumulative": True,
    "recency_bias": True,
    "logit_scale": 0.5,
    "shared_queries": "block",
}


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
    changes: dict | None = None,
) -> Path:
    """An ordinary checkpoint of a family. Returns its folder.

    `changes` are further keys of its config.json. `gated_llama` is for `write_house`: there is no
    ordinary model of that name.
    """
    facts = FACTS[base]
    if facts.is_tiny:
        return write_tiny(Path(folder), base, layers, seed, scale, dtype, changes or {})
    given = {"head_dim": head_dim, "attention_bias": attention_bias, "mlp_bias": mlp_bias}
    usual = {"head_dim": hidden // heads, "attention_bias": False, "mlp_bias": False}
    for key in set(given) - set(facts.options):
        if given[key] != usual[key]:
            raise ValueError(f"{base} has no {key}")
    config = {
        "architectures": [f"{FACTS[base].title}ForCausalLM"],
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
    config |= {key: given[key] for key in facts.options} | (changes or {})
    biases = [*facts.biased, *((*QKV, "o_proj", "attn_gate") if attention_bias else ())]
    biases += ["gate_proj", "up_proj", "down_proj"] if mlp_bias else []
    shapes = base_shapes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        biases=biases,
        qk_norm=facts.has_head_norms,
        tie=tie,
        gate=facts.has_gate,
    )
    tensors = {name: draw(name, shape, seed, scale, tie) for name, shape in shapes.items()}
    return write(Path(folder), config, tensors, dtype)


def _source_biases(
    names: list[str], starts: Sequence[int], is_cumulative: bool, seed: int
) -> dict[str, torch.Tensor]:
    """Random numbers for the queries of sites in order; every other site leaves a source out."""
    queries = [name for name in names if name.endswith("_res_proj.weight")]
    biases = {}
    for site, query in enumerate(queries):
        name = query.replace("_proj.weight", "_bias")
        count = 1 + sum(start <= site if is_cumulative else start < site for start in starts)
        biases[name] = draw(name, (count,), seed, 1.0, False)
        if site % 2 and count > 1:
            biases[name][site // 2 % count] = torch.finfo(torch.float32).min
    return biases


def write_house(
    folder: str | Path,
    base: str = "llama",
    *,
    block_size: int | None = None,
    block_starts: Sequence[int] | None = None,
    final_mix: bool | None = None,
    key_norm_eps: float | None = None,
    attn_res: dict | None = None,
    zero_queries: bool = False,
    **options,
) -> Path:
    """A house-format checkpoint; `options` are those of `write_standard`. Returns its folder.

    `final_mix` and `key_norm_eps` are left out of the config when None; `attn_res` holds further
    keys of its dictionary of that name.
    """
    given = {"final_mix": final_mix, "key_norm_eps": key_norm_eps}
    blocks = {"block_size": block_size} if block_starts is None else {"block_starts": block_starts}
    attn_res = blocks | (attn_res or {})
    attn_res |= {key: value for key, value in given.items() if value is not None}
    folder = write_standard(folder, base, **options)
    config = json.loads((folder / "config.json").read_text())
    layers, sublayers = config["num_hidden_layers"], FACTS[base].sublayers
    each = len(sublayers)
    owners = {
        None: range(each * layers),
        "layer": range(0, each * layers, each),
        "block": block_starts or range(0, each * layers, block_size or 1),
    }[attn_res.get("shared_queries")]
    shapes = residual_shapes(
        layers,
        config["hidden_size"],
        attn_res.get("final_mix", True),
        attn_res.get("recency_bias", False),
        owners,
        sublayers,
    )
    seed = options.get("seed", 0)
    tensors = {name: draw(name, shape, seed, 1.0, False) for name, shape in shapes.items()}
    if attn_res.get("source_bias"):
        starts = block_starts or range(0, each * layers, block_size or 1)
        tensors |= _source_biases(list(tensors), starts, attn_res.get("cumulative", False), seed)
    if zero_queries:
        tensors |= {name: torch.zeros(shapes[name]) for name in tensors if "_res_proj" in name}
    config |= {
        "model_type": f"attnres_{base}",
        "architectures": [f"AttnRes{FACTS[base].title}ForCausalLM"],
        "attn_res": attn_res,
    }
    tensors = load_file(folder / "model.safetensors") | tensors
    return write(folder, config, tensors, config["dtype"])
