"""The mend for inductor's scheduler that a compiled start on CPU needs."""

import torch
from compiling import lowered_anew, reset_compiler
from torch import Tensor

from attnres_serve.compat.workarounds import inductor


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


def test_a_buffer_is_read_after_it_was_filled() -> None:
    """Without the mend every element of the sum is NaN here, and silently wrong elsewhere."""
    inductor.PATCH.apply()
    reset_compiler()
    inputs = torch.randn(33, 64), torch.randn(33, 64), torch.randn(33, 1), torch.randn(33, 1)
    with torch.inference_mode(), lowered_anew():
        compiled = torch.compile(sums, fullgraph=True, dynamic=True)(*inputs)
        for found, wanted in zip(compiled, sums(*inputs), strict=True):
            torch.testing.assert_close(found, wanted)


def test_the_mend_is_made_once() -> None:
    from torch._inductor.scheduler import SchedulerNode

    inductor.PATCH.apply()
    once = SchedulerNode.recompute_size_and_body
    inductor.PATCH.apply()
    assert SchedulerNode.recompute_size_and_body is once
