"""Inputs of the kernels that work on a bank, and what their results may differ by."""

from dataclasses import dataclass

import pytest
import torch
from kernel_cases import NORM_EPS
from torch import Tensor
from triton_interpreter import DEVICE, poisoned


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
    if actual.numel():
        worst = ((actual.double() - expected).abs() / tolerance).max()
        assert worst <= 1, f"{float(worst):.3g} times the tolerance"


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
