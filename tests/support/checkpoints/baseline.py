"""Checkpoints of Depth-Attention's baseline: a Llama with `baseline_mode`."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpoints.house import write_house
from checkpoints.qwen import as_format
from checkpoints.tensors import renamed

_LEAVES = {"proj.weight": "pseudo_query", "norm.weight": "norm.weight", "bias": "recency_bias"}
_NAMES = {
    f"{stem}_res_{leaf}": f"{own}_aggregator.{its}"
    for stem, own in (
        ("self_attention", "attnres_attn"),
        ("mlp", "attnres_mlp"),
        ("output_attn", "attnres_final"),
    )
    for leaf, its in _LEAVES.items()
}
_HEAD_NORM = "lm_head_layernorm.weight"


def write_baseline(
    folder: str | Path,
    *,
    size: int | None = 4,
    layers: int = 3,
    mode: dict[str, str] | None = None,
    use_qk_norm: bool | None = None,
    scale_embeds: bool | None = None,
    **options,
) -> Path:
    """A `baseline_attnres` checkpoint; what is None is left out. Returns its folder."""
    starts, since = [0], 0
    for layer in range(layers):
        since += 2
        if since >= (size or 12):
            starts.append(2 * layer + 2)
            since = 0
    folder = Path(folder)
    spec = {"cumulative": True, "recency_bias": True}
    write_house(
        folder, "normed_llama", block_starts=starts, attn_res=spec, layers=layers, **options
    )
    stated = {
        "attnres_block_size": size,
        "use_qk_norm": use_qk_norm,
        "scale_embeds": scale_embeds,
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= mode or {"baseline_mode": "attnres"}
    config |= {key: value for key, value in stated.items() if value is not None}
    tensors = renamed(load_file(folder / "model.safetensors"), _NAMES)
    for name, tensor in tensors.items():
        if name.endswith("pseudo_query"):
            tensors[name] = tensor.flatten()
    if use_qk_norm is False:
        norms = (".q_norm.", ".k_norm.")
        tensors = {n: t for n, t in tensors.items() if not any(norm in n for norm in norms)}
    tensors[_HEAD_NORM] = torch.full_like(tensors["model.norm.weight"], 1e4)  # never read
    return as_format(folder, config, {}, tensors)
