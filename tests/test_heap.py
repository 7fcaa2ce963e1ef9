"""Memory that is freed and taken again without a page fault."""

import os
import subprocess
import sys

import pytest

from attnres_serve import heap

STEPS = 20
# As a prefill does it: some tensors at a time, all of them freed at the end.
FREE_AND_TAKE = f"""
import resource
import torch
from attnres_serve import heap

def step():
    tensors = [torch.ones(size, 2**18) for size in (3, 3, 3, 40, 3, 3, 3)]  # MiB

KEEP
for _ in range(3):  # until every hole has been made
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: str = "", **environment: str) -> int:
    """Page faults of all steps in a process of its own."""
    own = {key: os.environ[key] for key in os.environ.keys() - {"LD_PRELOAD", *heap.ENVIRONMENT}}
    command = [sys.executable, "-c", FREE_AND_TAKE.replace("KEEP", keep)]
    done = subprocess.run(
        command, env=own | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("way", ["call", "environment"])
def test_a_step_finds_the_memory_of_the_last_one(way):
    if faults() < STEPS * 1000:
        pytest.skip("this C library keeps what is freed")
    if way == "call":
        assert faults("heap.keep_freed()") < STEPS
    else:
        assert faults(**heap.ENVIRONMENT) < STEPS


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap.keep_freed()
