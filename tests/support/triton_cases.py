"""What the tests of the Triton kernels share: comparisons, poisoned memory, spied launches."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kernel_cases import KEY_EPS, NORM_EPS
from torch import Tensor
from triton_interpreter import DEVICE


def close(actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """No element is NaN or further from its expected value than its tolerance."""
    assert not actual.isnan().any()
    found = (actual.double() - expected).abs()
    # Not by the quotient: sources of zeros have exact scores, and a tolerance of zero.
    assert (found <= tolerance).all(), f"{float((found / tolerance).max()):.3g} times the tolerance"


AROUND = 64  # elements before and behind what is allocated


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the functions allocate holds NaN until it is written, and what is around for ever."""
    new_empty, made = Tensor.new_empty, []

    def poisoned(self: Tensor, shape: Sequence[int] | int, **options: Any) -> Tensor:
        if isinstance(shape, int):  # of the interpreter's own
            return new_empty(self, shape, **options)
        around = new_empty(self, math.prod(shape) + 2 * AROUND).fill_(torch.nan)
        made.append(around)
        return around[AROUND:-AROUND].view(*shape)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    yield
    for around in made:
        assert around[:AROUND].isnan().all() and around[-AROUND:].isnan().all()


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


def valid(function: Callable, tokens: int = 4, **changes: object) -> dict[str, Any]:
    """Arguments of a function of the Triton kernels, with changes."""
    own = {
        "single_pass": {"query": floats(96)},
        "phase_1": {"queries": floats(3, 96), "completes": True},
        "phase_2": {
            "query": floats(96),
            "answers": zeros(2, tokens, 96),
            "log_sums": floats(2, tokens),
            "position": 1,
        },
    }[function.__name__]
    state = {"delta": zeros(tokens, 96), "bank": zeros(tokens, 5, 96), "row": 3, "fresh": False}
    norm = {"norm_weight": zeros(96), "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
    return state | norm | own | changes
