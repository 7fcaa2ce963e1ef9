"""Phase 2 of two-phase in Triton: the square of a mix whose sources cancel.

``test_backend.py`` asks it what every backend is asked.
"""

import pytest
import torch
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, ROUNDINGS, Case, half_ulp
from torch import Tensor
from triton_cases import close, floats
from triton_interpreter import DEVICE

from attnres_serve.kernels import reference
from attnres_serve.kernels.triton.phase_2 import phase_2

pytestmark = pytest.mark.usefixtures("interpreter")


def _merge_into_a_block(block: Tensor, delta: Tensor, weight: Tensor, bias: float | None) -> Tensor:
    """A partial sum that begins with ``delta``, and the answer over the only block; no scores."""
    bank = torch.stack([block, torch.full_like(block, torch.nan)], 1)
    answers, log_sums = block[None].clone(), floats(1, len(block))
    options = {"row": 1, "position": 0, "fresh": True, "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
    query = floats(block.shape[1])
    own = None if bias is None else torch.tensor([0.0, bias], device=DEVICE)
    return phase_2(delta, bank, answers, log_sums, query, weight, **options, bias=own)


@pytest.mark.parametrize("bias", [None, 0.7])
@pytest.mark.parametrize("left", [0.5, 0.42, 2**-2, 2**-4, 2**-8, 2**-12, 0.0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_partial_sum_that_cancels_the_answer(
    dtype: torch.dtype, left: float, bias: float | None
) -> None:
    """``left`` of the mix remains; its square is a difference only where little is lost."""
    case = Case(tokens=3, count=1, hidden=257, device=DEVICE)
    (block,), weight = case.sources(dtype), case.norm_weight(dtype)
    weights = torch.softmax(torch.tensor([0.0, bias or 0.0], dtype=torch.float64), 0)
    delta = ((left - 1) * float(weights[0] / weights[1]) * block.double()).to(dtype)
    actual = _merge_into_a_block(block, delta, weight, bias)
    parts = [weights[0] * block.double(), weights[1] * delta.double()]
    mixed = parts[0] + parts[1]
    expected = reference.rms_norm(mixed, weight, NORM_EPS)
    apart = sum(part.square().sum(-1, keepdim=True) for part in parts)
    lost = apart / mixed.square().sum(-1, keepdim=True)
    lost = torch.where(lost < 8.0, lost, 1.0)  # three binary digits at most
    largest = torch.stack(parts).abs().amax((0, 2))[:, None]
    root = (mixed.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    gain = weight.double().abs().max() / root  # of an error of the mix by the output norm
    error = lost * expected.abs() + gain * largest
    close(actual, expected, half_ulp(expected, dtype) + ROUNDINGS * 2**-24 * error)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("huge", ["partial", "answer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_source_whose_square_is_infinite(dtype: torch.dtype, huge: str) -> None:
    """Without weight it changes nothing."""
    bias = -200.0 if huge == "partial" else 200.0
    case = Case(tokens=3, count=2, hidden=257, device=DEVICE)
    (block, delta), weight = case.sources(dtype), case.norm_weight(dtype)
    (delta if huge == "partial" else block).fill_(1e20)
    kept = (block if huge == "partial" else delta).double()
    actual = _merge_into_a_block(block, delta, weight, bias)
    expected = reference.rms_norm(kept, weight, NORM_EPS)
    close(actual, expected, half_ulp(expected, dtype) + ROUNDINGS * 2**-24 * expected.abs())
