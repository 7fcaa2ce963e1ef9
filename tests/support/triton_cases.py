"""Inputs of the kernels that work on a bank, and what their results may differ by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from kernel_cases import DTYPES, NORM_EPS
from torch import Tensor
from triton_interpreter import DEVICE, LAYOUTS, poisoned


@dataclass(frozen=True)
class Case:
    """``sites`` sites over ``count`` finished blocks of ``tokens`` x ``hidden``.

    Of the blocks, the last ``late`` were finished after phase 1; ``completes``: the next one is
    finished by the first site.
    """

    tokens: int = 3
    count: int = 4
    sites: int = 3
    hidden: int = 257
    dtype: torch.dtype = torch.bfloat16
    layout: str = "dense"
    spare: int = 1
    scale: float = 1.0
    query_scale: float = 1.0
    bias: float | None = None
    fresh: bool = False
    late: int = 0
    completes: bool = False
    weight_dtype: torch.dtype | None = None
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "plain"


@st.composite
def cases(draw: st.DrawFn, kind: type = Case, **fields: st.SearchStrategy) -> Any:
    """A case of a kernel's grid: what all grids have in common, and the fields of its own.

    Magnitudes go as far as the dtype has room.  Queries of size 0 give equal scores, those of size
    12 one that dominates.
    """
    dtype = draw(st.sampled_from(DTYPES))
    scales = (1.0, 1e4, 1e-4, 1e-6) + (1e15, 1e-20) * (dtype != torch.float16)
    common = {
        "tokens": st.sampled_from((1, 3, 0)),
        "layout": st.sampled_from(LAYOUTS),
        "spare": st.integers(0, 2),
        "scale": st.sampled_from(scales),
        "query_scale": st.sampled_from((0.0, 0.05, 1.0, 12.0)),
        "seed": st.integers(0, 2**31),
    }
    drawn = {name: draw(strategy) for name, strategy in (common | fields).items()}
    return kind(dtype=dtype, **drawn)


def in_turn(rows: Sequence[Any], dtypes: Sequence[torch.dtype] = DTYPES) -> list[Any]:
    """Each row in one dtype, in turn, and in the others where every combination is run."""
    return [
        pytest.param(
            replace(row, dtype=dtype),
            marks=[] if number % len(dtypes) == at else [pytest.mark.exhaustive],
        )
        for number, row in enumerate(rows)
        for at, dtype in enumerate(dtypes)
    ]


@dataclass
class Inputs:
    """Tensors of a case; what is not used yet is NaN."""

    storage: Tensor
    bank: Tensor
    queries: Tensor
    norm_weight: Tensor
    bias: Tensor | None
    generator: torch.Generator
    case: Case

    def random(self, *shape: int) -> Tensor:
        """Activations cut at three sigma, so that fp16 at scale 1e4 cannot overflow in one sum."""
        values = torch.randn(*shape, generator=self.generator).clamp(-3, 3) * self.case.scale
        return values.to(self.case.dtype).to(DEVICE)

    def vectors(self) -> Tensor:
        """A ``[T, d]`` view in the case's layout, filled with activations."""
        _, view = poisoned((self.case.tokens, self.case.hidden), self.case.layout, self.case.dtype)
        return view.copy_(self.random(*view.shape))

    def blocks(self) -> list[Tensor]:
        """Copies of the finished rows."""
        return [self.bank[:, i].clone() for i in range(self.case.count)]


def make_inputs(case: Case) -> Inputs:
    """Finished blocks, queries and weights of a case, random by its seed."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, case.count + case.spare, case.hidden)
    storage, bank = poisoned(shape, case.layout, case.dtype)
    queries = torch.randn(case.sites, case.hidden, generator=generator) * case.query_scale
    weight = torch.randn(case.hidden, generator=generator).to(case.weight_dtype or case.dtype)
    bias = None if case.bias is None else torch.tensor([case.bias], device=DEVICE)
    inputs = Inputs(storage, bank, queries.to(DEVICE), weight.to(DEVICE), bias, generator, case)
    bank[:, : case.count] = inputs.random(case.tokens, case.count, case.hidden)
    return inputs


def close(actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """No element is NaN or further from its expected value than its tolerance."""
    assert not actual.isnan().any()
    found = (actual.double() - expected).abs()
    # Not by the quotient: sources of zeros have exact scores, and a tolerance of zero.
    assert (found <= tolerance).all(), f"{float((found / tolerance).max()):.3g} times the tolerance"


def gain(mixed: Tensor, norm_weight: Tensor) -> Tensor:
    """By how much the output norm magnifies an error of the mix, ``[T, 1]``."""
    root = (mixed.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return norm_weight.double().abs().max() / root


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functions allocate holds NaN until a kernel writes it."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *arguments, **options) -> Tensor:
        tensor = new_empty(self, *arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


class Spy:
    """In place of a kernel: the grids it is launched on."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda **arguments: None


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def floats(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float32)
