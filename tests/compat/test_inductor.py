"""The mend for inductor's scheduler that a compiled start on CPU needs."""

import torch
from compiling import lowered_anew, reset_compiler

from attnres_serve.compat.workarounds import inductor
from tests.compat.faults.inductor import sums


def test_a_buffer_is_read_after_it_was_filled() -> None:
    """Without the mend every element of the sum is NaN here, and silently wrong elsewhere."""
    inductor.PATCH.apply()
    reset_compiler()
    inputs = torch.randn(33, 64), torch.randn(33, 64), torch.randn(33, 1), torch.randn(33, 1)
    with torch.inference_mode(), lowered_anew():
        compiled = torch.compile(sums, fullgraph=True, dynamic=True)(*inputs)
        for actual, expected in zip(compiled, sums(*inputs), strict=True):
            torch.testing.assert_close(actual, expected)


def test_the_mend_is_made_once() -> None:
    from torch._inductor.scheduler import SchedulerNode

    inductor.PATCH.apply()
    once = SchedulerNode.recompute_size_and_body
    inductor.PATCH.apply()
    assert SchedulerNode.recompute_size_and_body is once
