"""vLLM's latent attention on CPU with rows of any size, by vLLM's hook for backends from outside.

vLLM's metadata lists three sizes of a row, its kernel of a decode step is compiled for one of them,
and its backend takes blocks of 16 tokens alone, where a hybrid model's are larger: vLLM splits them
into blocks of 16 by itself.
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla import cpu_mla

from attnres_serve.families import latent

KERNEL_BLOCK = 16  # tokens


class _Metadata(mla_attention.MLACommonMetadata):
    def __post_init__(self) -> None:
        """Nothing: vLLM's refuses rows that are not of a listed size."""


class _Builder(mla_attention.MLACommonMetadataBuilder):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, metadata_cls=_Metadata, **named)


class Backend(cpu_mla.CPUMLABackend):
    """vLLM's ``CPU_MLA``, for every row and every multiple of its kernel's block."""

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
    """Attention of a layer; a row that vLLM's kernel does not have is decoded in torch."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write rows, of which vLLM's function needs a rotated part."""
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
        blocks: the numbers of the sequence's blocks, and others behind them.
        tokens: of the sequence.
    """
    size = cache.shape[1]
    return cache[blocks[: -(-tokens // size)]].flatten(0, 1)[:tokens]
