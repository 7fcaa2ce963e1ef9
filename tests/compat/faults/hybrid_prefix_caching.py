"""docs/build/upstream/prefix-caching-of-recurrent-layers-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ModelConfig


class Model(ModelConfig):
    """vLLM's configuration of a hybrid that generates, as far as it is asked."""

    pooler_config = None

    def __init__(self, architecture: str, mla: bool = False, row: tuple = (512, 64)) -> None:
        named = dict(zip(("kv_lora_rank", "qk_rope_head_dim"), row, strict=True))
        self.hf_config = self.hf_text_config = SimpleNamespace(
            architectures=[architecture], **named
        )
        self.mla = mla

    is_hybrid = property(lambda self: True)
    use_mla = property(lambda self: self.mla)


def fault() -> bool:
    """Prefixes of Mamba2 layers are cached, and the scan keeps no state of a chunk."""
    return Model("AttnResNemotronHForCausalLM").is_prefix_caching_supported and states(2) < 2


def states(chunks: int) -> int:
    """How many states the scan returns for a sequence of some chunks, asked for that of each."""
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

    tokens, heads, size, state = 4 * chunks, 2, 8, 16
    x = torch.randn(tokens, heads, size)
    lengths: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32),
        "cu_chunk_seqlens": torch.arange(0, tokens + 1, 4, dtype=torch.int32),
        "last_chunk_indices": torch.tensor([chunks - 1], dtype=torch.int32),
        "seq_idx": torch.zeros(chunks, dtype=torch.int32),
    }
    found = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu(
        x,
        torch.rand(tokens, heads),
        -torch.rand(heads),
        torch.randn(tokens, 1, state),
        torch.randn(tokens, 1, state),
        4,
        torch.empty_like(x),
        return_intermediate_states=True,
        **lengths,
    )
    return len(found)
