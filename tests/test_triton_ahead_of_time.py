"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, widths."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[1]
ARCHS = ("sm_80", "sm_90")
HIDDEN = (1024, 4096, 7168)
BEGINNINGS = {
    "single_pass": (False, True),
    "inter_block": (None,),
    "merge": (False, True),
    "norm_answer": (None,),
}
SHAPES = [
    (kernel, arch, hidden, fresh)
    for kernel, beginnings in BEGINNINGS.items()
    for arch in ARCHS
    for hidden in HIDDEN
    for fresh in beginnings
]
Shape = tuple[str, str, int, bool | None]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))


@cache
def _compiled() -> dict[Shape, dict[str, Any]]:
    """Everything compiled once, in a process where Triton is not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile_ahead", "--arch", "80", "90"]
    done = subprocess.run(
        [*command, "--hidden", *map(str, HIDDEN), "--dtype", "bfloat16"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    return {(k["kernel"], k["arch"], k["hidden"], k["fresh"]): k for k in kernels}


@every_shape
def test_nothing_spills(shape: Shape) -> None:
    """No stack and no access to local memory: a token's rows live in registers."""
    kernel = _compiled()[shape]
    assert kernel["spill_bytes"] == 0 and kernel["local_accesses"] == 0
    assert kernel["registers"] < 255


@every_shape
def test_every_access_is_128_bits_wide(shape: Shape) -> None:
    """Aligned pointers and strides reach the compiler: no narrower load or store is left."""
    name, _, hidden, fresh = shape
    kernel = _compiled()[shape]
    block = 1 << (hidden - 1).bit_length()
    pieces = block // (32 * kernel["num_warps"]) // 8  # of bf16, per thread and row
    # A row takes one of these pieces, a float32 query two.
    loads, stores = {
        # Delta, weight, query, tile before and in the loop; bank row and result.
        "single_pass": lambda: (4 + 2 * kernel["tile"] + (not fresh), 2),
        # A row before and in the loop, queries; answers.
        "inter_block": lambda: (2 + 2 * kernel["sites"], kernel["sites"]),
        # Delta, weight, query, answer; bank row and result.
        "merge": lambda: (5 + (not fresh), 2),
        "norm_answer": lambda: (2, 1),
    }[name]()
    # The log-sum-exp is one number of a token.
    scalar_loads = {"32": 1} if name == "merge" else {}
    scalar_stores = {"32": 1} if name == "inter_block" else {}
    assert kernel["loads"] == {"128": pieces * loads} | scalar_loads
    assert kernel["stores"] == {"128": pieces * stores} | scalar_stores


@every_shape
def test_one_binary_for_every_number_of_sources(shape: Shape) -> None:
    """Nor does it depend on sites, position or batch: none is compiled during a request."""
    assert _compiled()[shape]["binaries"] == 1


@every_shape
def test_bf16_is_rounded_to_nearest(shape: Shape) -> None:
    """The interpreter truncates to bf16, so the rounding of compiled code is read off its PTX."""
    assert set(_compiled()[shape]["roundings"]) == {"cvt.rn.bf16x2.f32"}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("kernel", ["single_pass", "merge"])
def test_two_programs_fit_a_hopper_sm(kernel: str, hidden: int) -> None:
    """One program's reductions hide behind another's loads; CONFIGS was chosen for this."""
    for fresh in (False, True):
        assert _compiled()[kernel, "sm_90", hidden, fresh]["programs_per_sm"] >= 2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_phase_1_keeps_sixteen_warps_on_an_sm(hidden: int, arch: str) -> None:
    """GROUP_CONFIGS was chosen for this; and no row passes through shared memory."""
    kernel = _compiled()["inter_block", arch, hidden, None]
    assert kernel["programs_per_sm"] * kernel["num_warps"] >= 16
    assert kernel["shared_bytes"] <= 4 * kernel["sites"] * kernel["num_warps"]


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
