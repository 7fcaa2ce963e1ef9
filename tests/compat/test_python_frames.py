"""Frames that do not end a chunk of CPython's just above a loop."""

import resource
import sys
from functools import partial

import pytest

from attnres_serve.compat.workarounds import python_frames
from attnres_serve.compat.workarounds.python_frames import call_with_room

CALLS = 500


def leaf() -> None:
    pass


# Larger than a frame of ``descend``, so that at some depth a chunk ends between it and its caller.
leaf.__code__ = leaf.__code__.replace(co_stacksize=100)


def loop() -> int:
    """Page faults of many calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def worst(function) -> int:
    """The most page faults of ``function`` below any number of frames, some chunks of them."""

    def descend(frames: int) -> int:
        return function() if frames == 0 else descend(frames - 1)

    return max(descend(frames) for frames in range(400))


def test_no_depth_maps_memory_with_every_call():
    if worst(loop) < CALLS:
        pytest.skip("this Python does not unmap a chunk at every return")
    assert worst(partial(call_with_room, loop)) < CALLS / 10


def test_arguments_results_and_errors_pass_through():
    assert call_with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_room(divmod, 1, 0)


def test_loops_get_room_once(monkeypatch):
    """What a process of vLLM's runs for ever, and only that: room costs more than a step may."""
    pytest.importorskip("vllm")
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    def ran(self):
        return sys._getframe().f_back.f_code

    loops = (EngineCoreProc, "run_busy_loop"), (WorkerProc, "worker_busy_loop")
    monkeypatch.setattr(DPEngineCoreProc, "run_busy_loop", DPEngineCoreProc.run_busy_loop)
    for owner, name in loops:
        monkeypatch.setattr(owner, name, ran)
    for _ in range(2):
        python_frames.PATCH.apply()
        for owner, name in loops:
            assert getattr(owner, name)(None) is call_with_room.__code__
            assert getattr(owner, name).__wrapped__ is ran
