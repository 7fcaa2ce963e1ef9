"""docs/build/upstream/prompt-logprobs-with-lora-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import torch

from tests.compat.faults.rows_without_adapter import OF_SLOTS, RANK, SLOTS, TOKENS, WIDTH, wrapper


class Manager:
    """As far as vLLM's manager of adapters is asked: whose rows the head is given."""

    def __init__(self, mapping: Any) -> None:
        self.set_adapter_mapping(mapping)

    def set_adapter_mapping(self, mapping: Any) -> None:
        self._last_mapping = mapping
        self.rows = wrapper(mapping.prompt_mapping)


def fault() -> bool:
    """Two rows of a prompt do not get the head of its adapter, beside a request of another one.

    As many rows are sampled as the prompt has, so that the shapes fit.
    """
    from vllm.lora.layers import LoRAMapping
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    x, head = torch.randn(4, WIDTH), torch.randn(TOKENS, WIDTH)
    down, up = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, TOKENS, RANK)
    manager = Manager(LoRAMapping((7, 7, 7, 9), (7, 9), is_prefill=True))
    found: list[torch.Tensor] = []

    def compute_logits(rows: torch.Tensor) -> torch.Tensor:
        found.append(rows @ head.T)
        manager.rows.add_lora_logits(found[-1], rows, down, up, 1.0)
        return found[-1]

    prompt = SimpleNamespace(
        prompt_token_ids=[3, 4, 5],
        in_progress_prompt_logprobs_cpu=None,
        num_computed_tokens=0,
        lora_request=SimpleNamespace(lora_int_id=7),
    )
    runner: Any = SimpleNamespace(
        num_prompt_logprobs={"tuned": 1},
        requests={"tuned": prompt},
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_id_to_index={"tuned": 0}),
        query_start_loc=SimpleNamespace(np=torch.tensor([0, 3, 4]).numpy()),
        model=SimpleNamespace(compute_logits=compute_logits),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        sampler=SimpleNamespace(compute_logprobs=torch.clone, gather_logprobs=gathered),
        lora_config=object(),
        lora_manager=SimpleNamespace(_adapter_manager=manager),
        _sync_device=lambda: None,
    )
    GPUModelRunner._get_prompt_logprobs_dict(runner, x, {"tuned": 3, "other": 1})
    slot = OF_SLOTS.index(7)
    wanted = x[:2] @ (head + up[slot, 0] @ down[slot, 0]).T
    return not torch.allclose(found[0], wanted, atol=1e-4)  # sums of six products below a hundred


def gathered(scores: torch.Tensor, count: int, tokens: torch.Tensor) -> tuple[Any, ...]:
    best = scores.topk(count).indices
    chosen = torch.cat([tokens[:, None], best], 1)
    return chosen.int(), scores.gather(1, chosen), torch.zeros_like(tokens), None
