"""BabyLM's `nanogpt`."""

from pathlib import Path

import torch

from checkpoints.tensors import base_shapes, draw, renamed, residual_shapes, write

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


def write_nanogpt(
    folder: str | Path,
    *,
    layers: int = 4,
    block_size: int = 4,
    gate: bool = True,
    bias: bool = False,
    tie: bool = True,
) -> Path:
    """A BabyLM `nanogpt` checkpoint. Returns the folder.

    `tie` True is left out of the config, as Transformers does when it writes one.
    """
    classes = {"AutoConfig": "NanoGPTConfig", "AutoModelForCausalLM": "NanoGPTForCausalLM"}
    hidden, heads, vocab = 64, 2, 320
    config = {
        "architectures": ["NanoGPTForCausalLM"],
        "auto_map": {auto: f"modeling_nanogpt.{name}" for auto, name in classes.items()},
        "model_type": "nanogpt",
        "attn_res_block_size": block_size,
        "bias": bias,
        "bidirectional": False,
        "block_size": 512,  # tokens of the context
        "bos_token_id": 1,
        "dropout": 0.0,
        "eos_token_id": 2,
        "layer_norm_epsilon": 1e-5,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "pad_token_id": 0,
        "rope_theta": 10000.0,
        "swiglu_mult": 8 / 3,
        "use_attn_gate": gate,
        "use_attn_res": True,
        "use_rmsnorm": True,
        "use_rope": True,
        "use_swiglu": True,
        "vocab_size": vocab,
    }
    if not tie:
        config["tie_word_embeddings"] = False
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "attn_gate")
    shapes = base_shapes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=192,  # 170 is two and two thirds times 64: rounded to a multiple of 64
        vocab=vocab,
        biases=(*linears, "gate_proj", "up_proj", "down_proj") if bias else (),
        qk_norm=False,
        tie=tie,
        gate=gate,
    )
    shapes |= residual_shapes(layers, hidden, True)
    tensors = {name: draw(name, shape, 0, 1.0, tie) for name, shape in shapes.items()}
    tensors |= {name: tensors[name].flatten() for name in shapes if "_res_proj" in name}
    tensors = renamed(tensors, {hf: own for own, hf in _HF_OF_NANOGPT.items()})
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        for leaf in ("weight", "bias") if bias else ("weight",):
            qkv = [tensors.pop(f"{stem}self_attn.{part}_proj.{leaf}") for part in "qkv"]
            tensors[f"{stem}attn.c_attn.{leaf}"] = torch.cat(qkv)
    tensors = renamed(tensors, {"model.layers.": "transformer.h."})
    return write(Path(folder), config, tensors, "bfloat16")
