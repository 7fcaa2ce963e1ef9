"""Requests without a LoRA adapter beside requests with one, on CPU.

vLLM 0.28 to 0.33: rows without an adapter have the number -1.  GPU kernels skip them; the CPU
functions read it as the last adapter, and apply that one.
Remove this with a vLLM whose functions skip such rows.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _leaving_rows(original: Any) -> Any:
    """Add nothing to rows without an adapter."""

    def expand(inputs, weights, output, numbers, *more, **options):
        """``inputs``: ``[rows, rank]``; ``numbers``: of adapters, ``[rows]``, or of one for all."""
        kept = inputs.masked_fill((numbers < 0)[:, None], 0)
        return original(kept, weights, output, numbers, *more, **options)

    return expand


PATCH = Patch(
    targets=(
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand",
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand_slice",
        # This module imports them under its names.
        "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand",
        "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand_slice",
    ),
    make=_leaving_rows,
    why="requests without an adapter got another one's answers",
    models="AttnRes models on CPU with `--enable-lora`",
    first=(0, 28),
    report="lora-beside-the-base-on-cpu",
)
