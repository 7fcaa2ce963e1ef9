"""FLA's own formats."""

import json
from pathlib import Path

from safetensors.torch import load_file

from checkpoints.house import write_house
from checkpoints.tensors import base_shapes, draw, renamed, residual_shapes, write

HF_OF_FLA = {
    "model.embeddings.": "model.embed_tokens.",
    "model.res_proj.": "model.output_attn_res_proj.",
    "model.res_norm.": "model.output_attn_res_norm.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".attn_res_proj.": ".self_attention_res_proj.",
    ".attn_res_norm.": ".self_attention_res_norm.",
}
FLA_OF_HF = {hf: fla for fla, hf in HF_OF_FLA.items()}
LOW_RANK = {
    f".{gate}_{part}_proj.": f".{gate}_proj.{place}."  # of Kimi Delta Attention's gates
    for gate in "fg"
    for place, part in enumerate("ab")
}
# By their names in the house format.
DELTA_KEYS = {
    "linear_num_key_heads": "num_heads",
    "linear_num_value_heads": "num_v_heads",
    "linear_key_head_dim": "head_dim",
    "linear_conv_kernel_dim": "conv_size",
    "gate_lower_bound": "lower_bound",
    "rms_norm_eps": "norm_eps",
}
DELTA_KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("max_position_embeddings", "tie_word_embeddings"),
)
DELTA_CLASSES = {"gated_deltanet": "GatedDeltaNetForCausalLM", "kda": "KDAForCausalLM"}


def write_fla(
    folder: str | Path,
    *,
    layers: int = 3,
    block_size: int | None = 4,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int | None = 1,
    intermediate: int | None = 96,
    vocab: int = 320,
    seed: int = 0,
    scale: float = 1.0,
    tie: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    window_size: int | None = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
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
        "hidden_ratio": 4,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 512,
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
        intermediate = -(-int(hidden * 4 * 2 / 3) // 256) * 256
    shapes = base_shapes(
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
        shapes |= residual_shapes(layers, hidden, True)
    tensors = {name: draw(name, shape, seed, scale, tie) for name, shape in shapes.items()}
    return write(Path(folder), config, renamed(tensors, FLA_OF_HF), dtype)


def write_fla_delta(folder: Path, model_type: str, block_size: int = 2, seed: int = 0) -> Path:
    """An FLA checkpoint of a class with a recurrence, with the weights of `write_house`.

    FLA's own class writes others in `fla_models`. Returns the folder.
    """
    write_house(folder, model_type, layers=4, block_size=block_size, seed=seed)
    house = json.loads((folder / "config.json").read_text())
    config = {key: house[key] for key in DELTA_KEPT}
    config |= {fla: house[key] for key, fla in DELTA_KEYS.items() if key in house}
    config |= {
        "architectures": [DELTA_CLASSES[model_type]],
        "attnres_block_size": block_size,
        "expand_v": house.get("linear_value_head_dim", config["head_dim"]) / config["head_dim"],
        "model_type": model_type,
    }
    tensors = renamed(load_file(folder / "model.safetensors"), LOW_RANK)
    return write(folder, config, renamed(tensors, FLA_OF_HF), "bfloat16")
