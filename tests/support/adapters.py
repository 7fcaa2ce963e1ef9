"""LoRA adapters as peft saves them, and the weights that they are merged into."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
RANK, SCALE = 4, 2.0
# Linear layers, without the embeddings, the head, the vectors of AttnRes and routers of experts.
LINEAR = re.compile(
    r"(?!.*(embed|lm_head|_res_|norm|\.(gate|router|router\.layer)\.weight)).*\.weight"
)

# Experts have no adapters on a CPU, and are not quantized there; the other two are refused.
UNTAKEN = r"\.experts\.|kv_b_proj|shared_expert_gate"


def linear_layers(tensors: dict[str, Tensor], without: str = UNTAKEN) -> list[str]:
    """The linear layers of a checkpoint, except those that ``without`` is found in."""
    return [
        name.removesuffix(".weight")
        for name, weight in tensors.items()
        if weight.dim() == 2 and LINEAR.fullmatch(name) and not re.search(without, name)
    ]


def targets(layers: list[str]) -> list[str]:
    """The last names of layers, as peft and vLLM call what adapters may change."""
    return sorted({layer.rpartition(".")[2] for layer in layers})


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], layers: list[str], seed: int = 3, size: float = 0.1
) -> dict[str, Tensor]:
    """Write a random adapter of some layers; returns the weights with the adapter merged."""
    generator = torch.Generator().manual_seed(seed)
    adapter, merged = {}, dict(tensors)
    for layer in layers:
        weight = tensors[f"{layer}.weight"].float()
        stem = f"base_model.model.{layer}"
        if layer.endswith("embed_tokens"):  # peft's of an embedding is that of the transpose
            down = size * torch.randn((RANK, weight.shape[0]), generator=generator)
            up = size * torch.randn((weight.shape[1], RANK), generator=generator)
            adapter |= {f"{stem}.lora_embedding_A": down, f"{stem}.lora_embedding_B": up}
            merged[f"{layer}.weight"] = weight + SCALE * (up @ down).T
            continue
        down = size * torch.randn((RANK, weight.shape[1]), generator=generator)
        up = size * torch.randn((weight.shape[0], RANK), generator=generator)
        adapter |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        merged[f"{layer}.weight"] = weight + SCALE * up @ down
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"}
    config["target_modules"] = targets(layers)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def copy_with(folder: Path, source: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def write_merged(folder: Path, base: Path, layers: list[str]) -> Path:
    """Write an adapter of a checkpoint, and beside it the merged checkpoint; returns that."""
    merged = write_adapter(folder, load_file(base / WEIGHTS), layers)
    return copy_with(folder.with_name(f"{folder.name}-merged"), base, merged)
