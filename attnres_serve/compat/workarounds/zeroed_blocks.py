"""Zeroing new blocks of the KV cache of hybrid models on CPU.

vLLM 0.32 and 0.33: the runner uses a block's number as the number of a kernel block.  If a block is
split into several kernel blocks, as in hybrid models with latent attention, it zeroes another
block, which may hold the state of a running sequence.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
    """Zero all kernel blocks of the new blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = self.compilation_config.static_forward_context
    for group in self.kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for name in group.layer_names:
                cache = layers[name].kv_cache  # [num_blocks x kernel's blocks, ...]
                cache.unflatten(0, (self.kv_cache_config.num_blocks, -1))[block_ids] = 0


PATCH = Patch(
    targets=("vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids",),
    make=lambda original: _zero_block_ids,
    why="zeros overwrote another block",
    models="AttnRes models on CPU",
    first=(0, 28),
    report="zeroed-blocks-on-cpu",
)
