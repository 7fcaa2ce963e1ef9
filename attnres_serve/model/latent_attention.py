"""vLLM's latent attention on CPU with rows of any size, through vLLM's hook for external backends.

vLLM's metadata accepts three row sizes, its decode kernel is compiled for one of them, and its
backend accepts only blocks of 16 tokens.  A hybrid model has larger blocks, which vLLM splits into
blocks of 16.
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla import cpu_mla

from attnres_serve.families import latent

KERNEL_BLOCK = 16  # tokens


class _Metadata(mla_attention.MLACommonMetadata):
    def __post_init__(self) -> None:
        """Skip vLLM's check, which refuses rows of other sizes."""


class _Builder(mla_attention.MLACommonMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, metadata_cls=_Metadata, **kwargs)


class Backend(cpu_mla.CPUMLABackend):
    """vLLM's ``CPU_MLA`` for rows of any size and blocks of any multiple of its kernel's block."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # all of them

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % KERNEL_BLOCK == 0

    @staticmethod
    def get_builder_cls() -> type[_Builder]:
        return _Builder

    @staticmethod
    def get_impl_cls() -> type["Attention"]:
        return Attention


class Attention(cpu_mla.CPUMLAImpl):
    """Attention of a layer; rows of a size that vLLM's kernel lacks are decoded in torch."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write rows that may have no rotated part, which vLLM's function needs."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1).to(kv_cache.dtype)
        is_token = slots >= 0  # the others are padding
        kv_cache.view(-1, rows.shape[-1])[slots[is_token]] = rows[is_token]

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (self.kv_lora_rank, self.qk_rope_head_dim) == latent.COMPILED:
            decoded: tuple[torch.Tensor, torch.Tensor | None]
            decoded = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return decoded
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        latents = queries.new_empty(*queries.shape[:-1], self.kv_lora_rank)
        decode = attn_metadata.decode
        each = zip(latents, queries, decode.block_table, decode.seq_lens.tolist(), strict=True)
        for out, query, blocks, tokens in each:
            rows = cached_rows(kv_c_and_k_pe_cache, blocks, tokens).float()
            weights = (query.float() @ rows.T * self.scale).softmax(-1)
            out.copy_(weights @ rows[:, : self.kv_lora_rank])
        return latents, None


def cached_rows(cache: torch.Tensor, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """The rows of a sequence, ``[tokens, channels]``.

    Args:
        cache: ``[blocks, tokens of a block, channels]``.
        blocks: the numbers of the sequence's blocks, and then unused ones.
        tokens: number of the sequence's tokens.
    """
    size = cache.shape[1]
    return cache[blocks[: -(-tokens // size)]].flatten(0, 1)[:tokens]
