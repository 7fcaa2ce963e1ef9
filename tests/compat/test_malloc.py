"""Memory that is freed and taken again without a page fault."""

import os
from types import SimpleNamespace

import pytest
from commands import python

from attnres_serve.compat.workarounds import malloc

STEPS = 20
FEW = STEPS * 1000  # page faults; the largest tensor of a step alone is 10 000 pages
# As a prefill does it: some tensors at a time, all of them freed at the end.
FREE_AND_TAKE = f"""
import resource
import torch
from attnres_serve.compat.workarounds import malloc

def step():
    tensors = [torch.ones(size, 2**18) for size in (3, 3, 3, 40, 3, 3, 3)]  # MiB

def faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({STEPS}):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
malloc.keep_freed()
# The least of three: a busy machine splits pages, which is a fault of another kind.
print(usual, min(faults() for _ in range(3)))
"""


def faults(**environment: str) -> tuple[int, int]:
    """Page faults of all steps in a process of its own: as it began, and told to keep memory."""
    own = {key: os.environ[key] for key in os.environ if not key.startswith(("MALLOC_", "LD_"))}
    usual, kept = map(int, python(FREE_AND_TAKE, env=own | environment).split())
    return usual, kept


def test_a_step_finds_the_memory_of_the_last_one():
    usual, kept = faults()
    if usual < FEW:
        pytest.skip("this C library keeps what is freed")
    assert kept < usual / 10  # not 0: a larger hole may still be made once


@pytest.mark.exhaustive
def test_a_process_that_is_started_with_the_environment_finds_it_too():
    if (usual := faults()[0]) < FEW:
        pytest.skip("this C library keeps what is freed")
    assert min(faults(**malloc.keep_freed())[0] for _ in range(3)) < usual / 10


def test_an_older_library_takes_a_lower_threshold(monkeypatch):
    def mallopt(parameter, value):
        asked.append((parameter, value))
        return int(parameter != malloc.M_MMAP_THRESHOLD or value <= 2**25)

    asked = []
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert malloc.keep_freed()["MALLOC_MMAP_THRESHOLD_"] == str(2**25)
    assert asked[1:] == [(malloc.M_MMAP_THRESHOLD, 2**25), (malloc.M_TRIM_THRESHOLD, 2**30)]
