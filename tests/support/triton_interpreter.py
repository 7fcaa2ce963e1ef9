"""Triton's interpreter for the tests of Triton kernels, and tensors to run them on.

Without a GPU the kernels run in the interpreter, which has to be chosen before Triton is imported:
conftest.py imports this first.  The variable is set around the import, of all kernels at once, and
while the fixture is in use, so that no process another test starts inherits it.
"""

import os
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
_VARIABLE = "TRITON_INTERPRET"
_before = os.environ.get(_VARIABLE)
assert "triton" not in sys.modules
if not ON_GPU:
    os.environ[_VARIABLE] = "1"

import triton  # noqa: E402  (the variable above comes first)

from attnres_serve.kernels.triton import phase_1, phase_2  # noqa: E402, F401

if _before is None:
    os.environ.pop(_VARIABLE, None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the variable set while a test runs, and the interpreter's arithmetic like a GPU's."""
    if not ON_GPU:
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


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself and 0 differs from -0."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
