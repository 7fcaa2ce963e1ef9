"""Requests without a LoRA adapter beside those of an adapter on CPU.

vLLM 0.28 to 0.33: rows of a batch that have no adapter have the number -1.  A GPU's kernels leave
them out; the CPU's functions read the last adapter by it, and answer for that one.
This can go with a vLLM whose functions leave such rows as they are.
"""

from typing import Any


def leave_as_they_are() -> None:
    """Let the functions that add an adapter's part add nothing to such rows (idempotent)."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    modules: tuple[Any, ...] = (lora_ops, punica_cpu)  # the second has names of its own for them
    for module in modules:
        module.bgmv_expand = _leaving_rows(module.bgmv_expand)
        module.bgmv_expand_slice = _leaving_rows(module.bgmv_expand_slice)


def _leaving_rows(own: Any) -> Any:
    if hasattr(own, "leaves_rows"):
        return own

    def expand(inputs, weights, output, numbers, *more, **options):
        """``inputs``: ``[rows, rank]``; ``numbers``: of adapters, ``[rows]``, or of one for all."""
        kept = inputs.masked_fill((numbers < 0)[:, None], 0)
        return own(kept, weights, output, numbers, *more, **options)

    expand.leaves_rows = True  # type: ignore[attr-defined]
    return expand
