"""Memory that is freed and taken again without a page fault."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from attnres_serve.compat.workarounds import malloc

STEPS = 20
# As a prefill does it: some tensors at a time, all of them freed at the end.
FREE_AND_TAKE = f"""
import resource
import torch
from attnres_serve.compat.workarounds import malloc

def step():
    tensors = [torch.ones(size, 2**18) for size in (3, 3, 3, 40, 3, 3, 3)]  # MiB

KEEP
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: str = "", **environment: str) -> int:
    """Page faults of all steps in a process of its own."""
    own = {key: os.environ[key] for key in os.environ if not key.startswith(("MALLOC_", "LD_"))}
    command = [sys.executable, "-c", FREE_AND_TAKE.replace("KEEP", keep)]
    done = subprocess.run(
        command, env=own | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("way", ["call", pytest.param("environment", marks=pytest.mark.exhaustive)])
def test_a_step_finds_the_memory_of_the_last_one(way):
    usual = faults()
    if usual < STEPS * 1000:
        pytest.skip("this C library keeps what is freed")
    # The least of three: a busy machine splits pages, which is a fault of another kind.
    found = min(
        faults("malloc.keep_freed()") if way == "call" else faults(**malloc.keep_freed())
        for _ in range(3)
    )
    assert found < usual / 10  # not 0: a larger hole may still be made once


def test_an_older_library_takes_a_lower_threshold(monkeypatch):
    def mallopt(parameter, value):
        asked.append((parameter, value))
        return int(parameter != malloc.M_MMAP_THRESHOLD or value <= 2**25)

    asked = []
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert malloc.keep_freed()["MALLOC_MMAP_THRESHOLD_"] == str(2**25)
    assert asked[1:] == [(malloc.M_MMAP_THRESHOLD, 2**25), (malloc.M_TRIM_THRESHOLD, 2**30)]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert malloc.keep_freed() == {}
