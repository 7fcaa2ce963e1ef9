"""docs/build/upstream/lora-left-out.md"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

RANK, WIDTH = 8, 16


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.q_proj"


def fault() -> bool:
    """An adapter of the layer 7 is loaded into a model that has the layer 0 alone."""
    assert layer(0) in loaded(0).loras
    try:
        return layer(7) in loaded(7).loras
    except ValueError as error:
        if layer(7) not in str(error):
            raise
        return False


def loaded(number: int) -> Any:
    """What vLLM's worker reads of an adapter of one layer."""
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    manager: Any = WorkerLoRAManager.__new__(WorkerLoRAManager)
    manager.lora_config = LoRAConfig(max_lora_rank=RANK, lora_dtype=torch.float32)
    manager.max_position_embeddings, manager.vocab_size = 64, 16
    manager._adapter_manager, manager._lora_model_cls = model_manager(), LoRAModel
    with TemporaryDirectory() as folder:
        write(Path(folder), number)
        return manager._load_adapter(LoRARequest(f"of layer {number}", number + 1, folder))


def model_manager() -> Any:
    """As far as vLLM's is asked, of a model whose one layer takes adapters."""
    model = nn.Module()
    model.attn_res_base = SimpleNamespace(  # type: ignore[assignment]
        needed={f"{layer(0)}.weight": (WIDTH, WIDTH)}, reordered=()
    )
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    return SimpleNamespace(
        model=model,
        supported_lora_modules=["q_proj"],
        packed_modules_mapping={},
        packed_modules={},
        modules={layer(0): SimpleNamespace(base_layer=nn.Module())},
        moe_ep_load_spec=None,
        _validate_moe_lora_format=lambda lora: None,
        _validate_modules_to_save=lambda lora: None,
        _validate_token_classification_lora=lambda lora: None,
    )


def write(folder: Path, number: int) -> None:
    name = f"base_model.model.{layer(number)}"
    parts = {"lora_A": torch.ones(RANK, WIDTH), "lora_B": torch.ones(WIDTH, RANK)}
    tensors = {f"{name}.{part}.weight": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
