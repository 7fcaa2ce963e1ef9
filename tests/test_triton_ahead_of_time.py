"""What the compiler makes of the single-pass kernel, without a GPU: registers, spills, widths."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[1]
ARCHS = ("sm_80", "sm_90")
HIDDEN = (1024, 4096, 7168)
SHAPES = [(arch, hidden, fresh) for arch in ARCHS for hidden in HIDDEN for fresh in (False, True)]


@cache
def _compiled() -> dict[tuple[str, int, bool], dict[str, Any]]:
    """Everything compiled once, in a process where Triton is not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile_ahead", "--arch", "80", "90"]
    done = subprocess.run(
        [*command, "--hidden", *map(str, HIDDEN), "--dtype", "bfloat16"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    return {(k["arch"], k["hidden"], k["fresh"]): k for k in kernels}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_nothing_spills(shape: tuple[str, int, bool]) -> None:
    """No stack and no access to local memory: a token's rows live in registers."""
    kernel = _compiled()[shape]
    assert kernel["spill_bytes"] == 0 and kernel["local_accesses"] == 0
    assert kernel["registers"] < 255


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_access_is_128_bits_wide(shape: tuple[str, int, bool]) -> None:
    """Aligned pointers and strides reach the compiler: no narrower load or store is left."""
    _, hidden, fresh = shape
    kernel = _compiled()[shape]
    block = 1 << (hidden - 1).bit_length()
    pieces = block // (32 * kernel["num_warps"]) // 8  # of bf16, per thread and row
    rows = 2 + 2 * kernel["tile"] + (not fresh)  # delta, weight, tile before and in the loop
    assert kernel["loads"] == {"128": pieces * (rows + 2)}  # and the float32 query
    assert kernel["stores"] == {"128": pieces * 2}  # the bank row and the result


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_one_binary_for_every_number_of_sources(shape: tuple[str, int, bool]) -> None:
    """Rows 0, 1, 3 and 16 launch the same binary: none is compiled during a request."""
    assert _compiled()[shape]["binaries"] == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_bf16_is_rounded_to_nearest(shape: tuple[str, int, bool]) -> None:
    """The interpreter truncates to bf16, so the rounding of compiled code is read off its PTX."""
    assert set(_compiled()[shape]["roundings"]) == {"cvt.rn.bf16x2.f32"}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_two_programs_fit_a_hopper_sm(hidden: int) -> None:
    """One program's reductions hide behind another's loads; CONFIGS was chosen for this."""
    for fresh in (False, True):
        assert _compiled()["sm_90", hidden, fresh]["programs_per_sm"] >= 2


def test_the_interpreter_is_refused() -> None:
    """Numbers of a kernel that is not compiled would be no numbers."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_ahead"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and not done.stdout
    assert "TRITON_INTERPRET is set" in done.stderr
