"""The mend for inductor's scheduler that a compiled start on CPU needs."""

from attnres_serve.compat.workarounds import inductor


def test_the_mend_is_made_once() -> None:
    from torch._inductor.scheduler import SchedulerNode

    inductor.PATCH.apply()
    once = SchedulerNode.recompute_size_and_body
    inductor.PATCH.apply()
    assert SchedulerNode.recompute_size_and_body is once
