"""The block size of latent attention on CPU in hybrid models.

vLLM 0.32 and 0.33: a hybrid model's block is enlarged until it holds a state of its linear layers,
and vLLM then asks the attention backend whether it supports that size.  ``CPU_MLA`` answers yes to
16 only, the block of its kernel, so that no hybrid with latent attention starts.  vLLM splits large
blocks into the kernel's by itself.
"""

from typing import Any

KERNEL_BLOCK = 16  # tokens


def accept_multiples() -> None:
    """Let the backend accept every multiple of its kernel's block (idempotent)."""
    try:
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    except ImportError:  # a vLLM without latent attention on CPU
        return
    backend: Any = CPUMLABackend
    backend.supports_block_size = classmethod(_supports_block_size)


def _supports_block_size(_, block_size: int | None) -> bool:
    return block_size is None or block_size % KERNEL_BLOCK == 0
