"""Frames that do not end a chunk of CPython's just above a loop."""

import resource
from functools import partial

import pytest

from attnres_serve.frames import call_with_room

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
