"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, widths."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attnres_serve.kernels.triton import common
from benchmarks.kernels import compile_ahead

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
ARCHS = ("sm_80", "sm_90")
OTHERS = ("sm_89", "sm_100", "sm_120")
# A compilation takes seconds; one architecture and size show what a change does to a kernel.
IN_BOTH = [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90"]
HIDDEN = (1024, 4096, 7168)
SIZES = [*(pytest.param(size, marks=pytest.mark.exhaustive) for size in HIDDEN[:-1]), HIDDEN[-1]]
BEGINNINGS = {
    name: (False, True) if name in compile_ahead.BEGINNING else (None,)
    for name in compile_ahead.KERNELS
}
# Kernels with a binary for each power of two of sites (from 8), or of sixteens of them: a model has
# a few, and its first step, of as many tokens as there may be, launches all.
BINARIES = {"score_group": 3, "weigh_group": 2}
PRODUCTS = ("score_group", "score_group_few", "score_group_most")
ALIKE = (*PRODUCTS, "weigh_group")  # at every hidden size
SHAPES = [
    (kernel, arch, hidden, fresh)
    for kernel, beginnings in BEGINNINGS.items()
    for arch in (*ARCHS, *(OTHERS if kernel in PRODUCTS else ()))
    for hidden in (HIDDEN[-1:] if kernel in ALIKE else HIDDEN)
    for fresh in beginnings
]
Shape = tuple[str, str, int, bool | None]
# Bytes and instructions, where spilling was faster than the config that spills none, and where no
# other config was measured.
SPILLS = {("score_group", "sm_90"): (104, 78), ("score_group_most", "sm_90"): (72, 39)}


def _few(kernel: str, *shape: object) -> bool:
    """Whether it is another config of a kernel."""
    return kernel.endswith(("_few", "_most"))


every_shape = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            shape,
            marks=[pytest.mark.exhaustive] * (shape[1:3] != ("sm_90", HIDDEN[-1]) or _few(*shape)),
        )
        for shape in SHAPES
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)


def _compiled(shape: Shape) -> dict[str, Any]:
    return _all_of(shape[1], shape[2], _few(*shape))[shape]


@cache
def _all_of(arch: str, hidden: int, few: bool) -> dict[Shape, dict[str, Any]]:
    """Everything compiled once, in a process where Triton is not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels.compile_ahead"]
    command += ["--arch", arch.removeprefix("sm_"), "--kernel"]
    asked = {shape[0] for shape in SHAPES if shape[1:3] == (arch, hidden) and _few(*shape) == few}
    command += [*asked]
    done = subprocess.run(
        [*command, "--hidden", str(hidden), "--dtype", "bfloat16"],
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
    kernel, (most, accesses) = _compiled(shape), SPILLS.get(shape[:2], (0, 0))
    assert kernel["spill_bytes"] <= most and kernel["local_accesses"] <= accesses


@every_shape
def test_every_access_is_128_bits_wide(shape: Shape) -> None:
    """Aligned pointers and strides reach the compiler: no narrower load or store is left."""
    name, _, hidden, fresh = shape
    name, kernel = name.removesuffix("_few").removesuffix("_most"), _compiled(shape)
    block = 1 << (hidden - 1).bit_length()
    pieces = block // (32 * kernel["num_warps"]) // 8  # of bf16, per thread and row
    # A row takes one of these pieces, a float32 query two.
    loads, stores = {
        # Delta, weight, query, tile before and in the loop; bank row and result.
        "single_pass": lambda: (4 + 2 * kernel["tile"] + (not fresh), 2),
        # Delta, weight, and in the first and a later turn a row before and in the loop and queries;
        # bank row, result, and answers in both (a first turn of one site has none).  Where it only
        # adds, delta; bank row.
        "phase_1": lambda: (
            7 + 4 * kernel["sites"] + 2 * (not fresh),
            3 + 2 * kernel["sites"] - (kernel["sites"] == 1),
        ),
        # Of a program's tokens: delta; the row.  What is multiplied is copied to shared memory.
        "score_group": lambda: (1 + (not fresh), 1),
        "weigh_group": lambda: (0, 0),
        # A row before and in the loop, and the norm's weight; the result.
        "mix_group": lambda: (3, 1),
        # Delta, weight, query, answer; bank row and result.
        "phase_2": lambda: (5 + (not fresh), 2),
        # And a tile before and in the loop.
        "phase_2_rows": lambda: (5 + 2 * kernel["tile"] + (not fresh), 2),
    }[name]()
    if name == "score_group":
        pieces = kernel["tokens"] * kernel["chunk"] // (32 * kernel["num_warps"]) // 8
    if name == "weigh_group":  # weights, in fours
        pieces, stores = 32 * 32 // 32 // 4, 1
    if name == "mix_group":  # a chunk in two places and weights in fours; answers
        loads += (2 + kernel["sites"] // 4) / pieces
        stores += kernel["sites"] / pieces
    # Log-sum-exps and scores are numbers of a token.
    numbers_in, numbers_out = {
        "phase_1": lambda: (0, 1 + (kernel["sites"] > 1)),
        # A thread has a part of a program's tokens, or of nine rows' room, 16.
        "score_group": lambda: (0, kernel["sites"] * kernel["tokens"] // 32 // kernel["num_warps"]),
        "weigh_group": lambda: (32 * 32 // 32, 1),
        "mix_group": lambda: (1, 0),
        "phase_2": lambda: (1, 0),
        "phase_2_rows": lambda: (1, 0),
    }.get(name, lambda: (0, 0))()
    assert kernel["loads"] == _counts(pieces * loads, numbers_in)
    assert kernel["stores"] == _counts(pieces * stores, numbers_out)


def _counts(wide: int, numbers: int) -> dict[str, int]:
    return {width: n for width, n in (("128", wide), ("32", numbers)) if n}


@every_shape
def test_one_binary_for_every_number_of_sources(shape: Shape) -> None:
    """Nor does it depend on sites, position or batch: none is compiled during a request."""
    assert _compiled(shape)["binaries"] == BINARIES.get(shape[0], 1)


@every_shape
def test_an_early_launch_waits_before_it_touches_memory(shape: Shape) -> None:
    """Read off the machine code, because a compiler may move loads; before sm_90 there is none."""
    kernel = _compiled(shape)
    early = shape[1] not in ("sm_80", "sm_89")
    assert kernel["starts_early"] == early
    # And it never releases its followers ("launch_dependents").
    assert kernel["grid_control"] == (["wait"] if early else [])
    assert kernel["accesses_before_wait"] == (0 if early else None)


@every_shape
def test_strides_have_64_bits(shape: Shape) -> None:
    """A row's offset is a stride times its number, and a bank may exceed 2^31 elements.

    The interpreter gives a stride the bits that its value needs, whatever the kernel says.
    """
    assert _compiled(shape)["narrow_strides"] == []


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("kernel", ["single_pass", "phase_2"])
def test_two_programs_fit_a_hopper_sm(kernel: str, hidden: int) -> None:
    """One program's reductions hide behind another's loads; CONFIGS was chosen for this."""
    for fresh in (False, True):
        assert _compiled((kernel, "sm_90", hidden, fresh))["programs_per_sm"] >= 2


@pytest.mark.parametrize("arch", IN_BOTH)
@pytest.mark.parametrize("hidden", SIZES)
def test_phase_1_spends_few_instructions_on_a_row(hidden: int, arch: str) -> None:
    """GROUP_CONFIGS was chosen for this; and no row passes through shared memory.

    Of an element and a site, eight at most: a conversion and a square, which sites share, a product
    with the query, a rescaled sum, and what reductions cost.  With twice the warps it is nine.
    """
    kernel = _compiled(("phase_1", arch, hidden, False))
    threads = 32 * kernel["num_warps"]
    elements = kernel["sites"] * (1 << (hidden - 1).bit_length())
    assert kernel["loop_instructions"][0] * threads / elements <= 8
    assert kernel["shared_bytes"] <= 4 * kernel["sites"] * kernel["num_warps"]


def test_the_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of a kernel that is not compiled would be no numbers."""
    monkeypatch.setattr(common, "INTERPRETED", True)
    monkeypatch.setattr(sys, "argv", ["compile_ahead"])
    with pytest.raises(SystemExit):
        compile_ahead.main()
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
