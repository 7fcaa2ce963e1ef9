"""Rows times the matrices of their groups, in C++ and in torch, against the definition."""

from itertools import pairwise

import pytest
import torch

from attnres_serve.kernels import grouped
from attnres_serve.kernels.cpp import backend as cpp

SIZES = (((1,), 7, 5), ((4, 0, 5), 33, 64), ((0, 50, 3), 96, 100), ((17, 1), 16, 448), ((0,), 4, 4))


@pytest.fixture(params=["C++", "torch"])
def ready(request, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp.problem() is None
    monkeypatch.setattr(cpp, "_ready", request.param == "C++")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(("counts", "out", "width"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_row_has_its_own_matrix(counts, out, width, dtype) -> None:
    draw = torch.Generator().manual_seed(out)
    x = torch.randn(sum(counts), width, generator=draw)
    weight = torch.randn(len(counts), out, width, generator=draw).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0)
    spans = [*pairwise(starts.tolist())]
    parts = [
        x[a:b].double() @ matrix.double().T for (a, b), matrix in zip(spans, weight, strict=True)
    ]
    found = grouped.grouped_linear(x, weight, starts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(3, 4)}, "do not fit"),
        ({"x": torch.zeros(3, 5).double()}, "float32 rows"),
        ({"x": torch.zeros(5, 3).T}, "float32 rows"),
        ({"starts": torch.tensor([0, 1, 4])}, "outside of the rows"),
        ({"starts": torch.tensor([0, 3])}, "do not fit"),
        ({"weight": torch.zeros(2, 6, 5).long()}, "takes float32"),
    ],
    ids=str,
)
def test_what_would_be_misread_is_refused(change, said) -> None:
    """Nothing is read or written beyond an argument."""
    assert cpp.problem() is None
    given = {"x": torch.zeros(3, 5), "weight": torch.zeros(2, 6, 5)}
    given |= {"starts": torch.tensor([0, 1, 3])} | change
    with pytest.raises(RuntimeError, match=said):
        grouped.grouped_linear(**given)
