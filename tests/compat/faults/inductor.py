"""Inductor's order of a buffer's reads and writes."""

import torch
from torch import Tensor

from tests.support.compiling import lowered_anew, reset_compiler


@torch.library.custom_op("attnres_tests::fill", mutates_args=("out",))
def fill(out: Tensor, x: Tensor) -> None:
    """Write into a buffer, as vLLM's matrix products on CPU do."""
    out.copy_(x)


def sums(x: Tensor, y: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest graph that inductor of torch 2.13 puts out of order.

    `total` is one loop over all elements; its fusion with `other`, two loops, makes inductor forget
    that `out` is read after it was filled, so that both are then fused with the earlier `gated`.
    """
    gated = x * gate
    out = torch.full_like(x, float("nan"))  # what memory held
    fill(out, gated)
    total = x + y + out
    other = (x - y) * weight
    return total, other


def fault() -> bool:
    """A sum of a buffer is NaN, as the buffer was before it was filled."""
    reset_compiler()
    inputs = torch.randn(33, 64), torch.randn(33, 64), torch.randn(33, 1), torch.randn(33, 1)
    with torch.inference_mode(), lowered_anew():
        both = torch.compile(sums, fullgraph=True, dynamic=True)(*inputs)
        return not all(map(torch.allclose, both, sums(*inputs)))
