"""Requests without a LoRA adapter beside those of an adapter on CPU.

vLLM 0.28 to 0.33: rows of a batch that have no adapter have the number -1.  A GPU's kernels leave
them out; the CPU's functions read the last adapter by it, and answer for that one.
This can go with a vLLM whose functions leave such rows as they are.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _leaving_rows(original: Any) -> Any:
    """Let a function that adds an adapter's part add nothing to such rows."""

    def expand(inputs, weights, output, numbers, *more, **options):
        """``inputs``: ``[rows, rank]``; ``numbers``: of adapters, ``[rows]``, or of one for all."""
        kept = inputs.masked_fill((numbers < 0)[:, None], 0)
        return original(kept, weights, output, numbers, *more, **options)

    return expand


PATCH = Patch(
    targets=(
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand",
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand_slice",
        # This module has names of its own for them.
        "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand",
        "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand_slice",
    ),
    make=_leaving_rows,
    why="requests without an adapter got another one's answers",
    models="AttnRes models on CPU with `--enable-lora`",
    first=(0, 28),
    report="lora-beside-the-base-on-cpu",
)
