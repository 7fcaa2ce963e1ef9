"""docs/build/upstream/lora-beside-the-base-on-cpu.md"""

from typing import Any

import torch

WIDTH, RANK, TOKENS, SLOTS = 6, 3, 8, 2
OF_SLOTS: list[int | None] = [7, 9]  # the ids of the adapters in the slots


def fault() -> bool:
    """A row without an adapter, beside one with an adapter, gets something of an adapter."""
    x, y = torch.randn(2, WIDTH), torch.randn(2, TOKENS)
    down, up = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, TOKENS, RANK)
    found = y.clone()
    wrapper((0, 7)).add_lora_linear(found, x, (down,), (up,), 1.0, (TOKENS,))
    assert not found[1].equal(y[1]), "the other row got nothing"
    return not found[0].equal(y[0])


def wrapper(ids: tuple[int, ...]) -> Any:
    """vLLM's, for rows with the adapters of these ids; 0 is none."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    found = PunicaWrapperCPU(64, 64, "cpu")
    found.update_metadata(LoRAMapping(ids, ids, is_prefill=True), OF_SLOTS, SLOTS + 1, TOKENS)
    return found
