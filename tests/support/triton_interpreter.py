"""Triton's interpreter for the tests of Triton kernels, and tensors to run them on.

Without a GPU the kernels run in the interpreter, which has to be chosen before Triton is imported.
The variable is set around that import, of all kernels at once, and while the fixture is in use, so
that no process another test starts inherits it.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
_VARIABLE = "TRITON_INTERPRET"
_before = os.environ.get(_VARIABLE)
if not ON_GPU and "triton" not in sys.modules:
    os.environ[_VARIABLE] = "1"

import triton  # noqa: E402  (the variable above comes first)

from attnres_serve.kernels.triton import (  # noqa: E402
    common,
    phase_1,  # noqa: F401
    phase_2,  # noqa: F401
    single_pass,  # noqa: F401
)

if _before is None:
    os.environ.pop(_VARIABLE, None)

# False if another module of this test run imported Triton without the interpreter.
INTERPRETED = common.INTERPRETED and not isinstance(triton.language.sum, triton.JITFunction)
RUNNABLE = ON_GPU or INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the variable set while a test runs, and the interpreter's arithmetic like a GPU's."""
    if RUNNABLE and not ON_GPU:
        monkeypatch.setenv(_VARIABLE, "1")
        round_bf16_to_nearest(monkeypatch)
        _sum_pairwise(monkeypatch)


def round_bf16_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9's interpreter truncates float32 to bf16; compiled code has cvt.rn.bf16."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target) != (triton.language.float32, triton.language.bfloat16):
            return convert(data, source, target, rounding_mode)
        rounded = torch.tensor(data).to(torch.bfloat16).view(torch.int16)
        return rounded.numpy().view("uint16").reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def _sum_pairwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9's interpreter adds joined tensors term by term; threads and warps add as a tree.

    numpy sums pairwise only along a contiguous axis.  Of 4097 squares the one-by-one sum is off by
    34 units of 2^-24 where the tree is off by 2, and the error of a score would be mostly that.
    """
    from triton.runtime import interpreter

    def add(self, operand):
        axis = range(operand.handle.data.ndim)[self.axis]
        data = np.ascontiguousarray(np.moveaxis(operand.handle.data, axis, -1)).sum(-1)
        assert not self.keep_dims
        return self.to_tensor(data, operand.dtype)

    monkeypatch.setattr(interpreter.ReduceOps, "sum", add)


def alone(module: dict[str, Any]) -> Callable[[pytest.Config], None]:
    """A test in the place of those of a module, where Triton was imported without the interpreter.

    It runs them in a process of its own.
    """
    for name in [name for name in module if name.startswith("test_")]:
        del module[name]

    def test_in_a_process_of_its_own(pytestconfig: pytest.Config) -> None:
        passes_in_a_process_of_its_own(module["__file__"], pytestconfig)

    return test_in_a_process_of_its_own


def passes_in_a_process_of_its_own(file: str, config: pytest.Config) -> None:
    """Run a test file with the interpreter, where Triton was imported here without it.

    Of its tests those that were chosen here by their marks.
    """
    assert _VARIABLE not in os.environ, "the interpreter was asked for and is not in use"
    chosen = "-p", "no:cacheprovider", "-m", config.option.markexpr
    child = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q", "--maxfail=3"), *chosen, file],
        cwd=Path(__file__).parents[2],
        env=os.environ | {_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "passed" in child.stdout


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself and 0 differs from -0."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
