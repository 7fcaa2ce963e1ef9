"""What all makers share: names and shapes, random values, and a complete folder."""

import json
import math
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

GOLDENS = Path(__file__).parents[2] / "goldens"
TOKENIZER_SOURCE = GOLDENS / "fla_transformer_block"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

SUBLAYERS = ("self_attention", "mlp")


def renamed(tensors: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """The tensors with the first matching part of each name replaced."""
    renamed = {}
    for name, tensor in tensors.items():
        old, new = next(((old, new) for old, new in table.items() if old in name), ("", ""))
        renamed[name.replace(old, new) if old else name] = tensor
    return renamed


def draw(name: str, shape: tuple[int, ...], seed: int, scale: float, tie: bool) -> Tensor:
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
    elif "embed_tokens" in name or "word_embeddings" in name:
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


def base_shapes(
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


def residual_shapes(
    layers: int,
    hidden: int,
    final_mix: bool,
    recency_bias: bool = False,
    owners: Sequence[int] | None = None,
    sublayers: tuple[str, ...] = SUBLAYERS,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the queries and key norms, house format.

    `owners` are the sublayers that have some, all of them when None; every layer has `sublayers`.
    """
    each = len(sublayers)
    stems = [
        f"model.layers.{s // each}.{sublayers[s % each]}" for s in owners or range(each * layers)
    ] + (["model.output_attn"] if final_mix else [])
    shapes: dict[str, tuple[int, ...]] = {}
    for stem in stems:
        shapes[stem + "_res_proj.weight"] = (1, hidden)
        shapes[stem + "_res_norm.weight"] = (hidden,)
        if recency_bias:
            shapes[stem + "_res_bias"] = ()
    return shapes


def is_source_bias(name: str, tensor: Tensor) -> bool:
    """Whether a tensor has a number for every source of a site, which is float32 always."""
    return name.endswith("_res_bias") and tensor.dim() == 1


def write(folder: Path, config: dict, tensors: dict[str, Tensor], dtype: str) -> Path:
    """A complete checkpoint in `folder`, tokenizer included."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = {
        name: (t if is_source_bias(name, t) else t.to(getattr(torch, dtype))).contiguous()
        for name, t in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER_SOURCE / name, folder / name)
    return folder
