"""docs/build/upstream/zeroed-blocks-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import torch

BLOCKS = 7


def fault() -> bool:
    """A new block, which is four of the attention kernel's, is not the one that is zeroed."""
    new = [2, 5]
    cache = torch.ones(BLOCKS * 4, 16, 8)
    zero(cache, split=4, new=new)
    kept = cache.view(BLOCKS, -1)
    return any(
        bool(kept[block].any() if block in new else not kept[block].all())
        for block in range(BLOCKS)
    )


def zero(cache: torch.Tensor, split: int, new: list[int]) -> torch.Tensor:
    """Have vLLM's runner zero new blocks of attention in a cache, ``[BLOCKS * split, 16, 8]``.

    Returns that of a layer of states beside it, ``[BLOCKS, 8]``, which was all ones.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    attention = FullAttentionSpec(
        block_size=16 * split, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    mamba = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), mamba_type="mamba2")
    states = torch.ones(BLOCKS, 8)
    layers = {
        "attention": SimpleNamespace(kv_cache=cache),
        "states": SimpleNamespace(kv_cache=[states]),
    }
    groups = [
        SimpleNamespace(kv_cache_spec=attention, layer_names=["attention"]),
        SimpleNamespace(kv_cache_spec=mamba, layer_names=["states"]),
    ]
    runner: Any = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    CPUModelRunner._zero_block_ids(runner, new)
    return states
