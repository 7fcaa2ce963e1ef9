"""Refusals of LoRA adapters over HTTP."""

import asyncio
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

WRAPPED = (
    "Call to add_lora method failed: Worker failed with error 'the LoRA adapter 'mine' changes "
    "model.layers.0.x, to which vLLM applies no adapter.', please check the stack trace above for "
    "the root cause"
)


def fault() -> bool:
    """An adapter that the engine refuses is answered with 500."""
    answer, asked = load(RuntimeError(WRAPPED), Path("nowhere"))
    assert asked == ["mine"]
    return answer.error.code == 500


def load(reason: Exception | None, folder: Path, lora: bool = True) -> Any:
    """What vLLM answers for an adapter that its engine takes, or refuses for a reason.

    With the names for which the engine was asked; without ``lora`` it takes no adapters.
    """
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    from vllm.utils.counter import AtomicCounter

    asked = []

    async def add_lora(request) -> None:
        asked.append(request.lora_name)
        if reason is not None:
            raise reason

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(
                attn_res_config={"hidden_size": 8}, architectures=["AttnResLlamaForCausalLM"]
            )
        ),
        lora_config=SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32) if lora else None,
    )
    serving: Any = OpenAIServingModels.__new__(OpenAIServingModels)
    serving.engine_client = SimpleNamespace(add_lora=add_lora, vllm_config=config)
    serving.lora_resolver_lock = defaultdict(asyncio.Lock)
    serving.lora_requests, serving.lora_id_counter = {}, AtomicCounter(0)
    serving.registry = SimpleNamespace(is_base_model=lambda name: False)
    request = LoadLoRAAdapterRequest(lora_name="mine", lora_path=str(folder))
    return asyncio.run(serving.load_lora_adapter(request)), asked
