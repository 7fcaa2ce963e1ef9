"""The short convolution against torch's own, sequence by sequence."""

import pytest
import torch
from torch.nn.functional import conv1d, silu

from attnres_serve.kernels.recurrence import short_convolution

LENGTHS = (1, 2, 9, 0, 30)
FAR = 1e-14  # sums of up to seven products in float64: some tens of roundings of 2^-53


def given(channels: int, width: int, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    tokens = sum(LENGTHS) + 2  # two tokens of padding
    return {
        "x": torch.randn(tokens, channels).to(dtype),
        "weight": torch.randn(channels, width, dtype=torch.float64).to(dtype),
        "state": torch.randn(9, channels, width - 1).to(dtype),
        "slots": torch.tensor([3, 8, 1, 2, 5], dtype=torch.int32),
        "starts": torch.tensor((0, *LENGTHS)).cumsum(0).int(),
        "has_history": torch.tensor([True, False, True, True, False]),
    }


def expected(x, weight, state, slots, starts, has_history):
    """Outputs, and the states that are left."""
    state, out = state.clone(), torch.zeros_like(x)
    for n, length in enumerate(LENGTHS):
        if not length or slots[n] <= 0:
            continue
        tokens = slice(int(starts[n]), int(starts[n + 1]))
        before = state[slots[n]] if has_history[n] else torch.zeros_like(state[slots[n]])
        line = torch.cat([before, x[tokens].T], dim=1)
        out[tokens] = silu(conv1d(line[None], weight[:, None], groups=len(weight))[0].T)
        state[slots[n]] = line[:, line.shape[1] - before.shape[1] :]
    return out, state


@pytest.mark.parametrize(("width", "slots"), [(1, ()), (2, ()), (4, ()), (7, ()), (4, (0, -1))])
def test_equals_torchs(width, slots):
    """But for padding, of slots that are none, which is left out."""
    call = given(6, width)
    call["slots"][1 : 1 + len(slots)] = torch.tensor(slots, dtype=torch.int32)
    right, kept = expected(**call)
    torch.testing.assert_close(short_convolution(**call), right, rtol=0, atol=FAR)
    assert torch.equal(call["state"], kept)


def test_half_precision_is_summed_in_float32():
    call = given(6, 4, torch.bfloat16)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    right, _ = expected(**wide)
    found = short_convolution(**call)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place, and near zero some roundings of float32.
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-6)


def test_a_prompt_in_pieces_is_the_prompt():
    call = given(6, 4)
    x, state = call["x"][:30], call["state"]
    slots = torch.tensor([5])

    def run(begin: int, end: int):
        starts, had = torch.tensor([0, end - begin]), torch.tensor([begin > 0])
        return short_convolution(x[begin:end], call["weight"], state, slots, starts, had)

    whole, kept = run(0, 30), state.clone()
    pieces = [run(0, 2), run(2, 3), run(3, 17), run(17, 30)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=FAR)
    assert torch.equal(state, kept)
