"""The recurrence in C++ against the one in torch, which computes in float64 here."""

import pytest
import torch
from ragged import KINDS, random

from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.interface import BackendError
from attnres_serve.kernels.recurrence import in_torch, recurrence

SIZES = ((128, 128), (64, 64), (256, 64), (32, 32), (16, 80), (17, 5), (100, 33), (1, 1))
FLOAT, HALVES = torch.float32, (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def compiled():
    """One thread: on a busy machine torch's small products wait for each other otherwise."""
    assert cpp.problem() is None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(by, found, expected) -> bool:
    """Bit for bit by C++; torch rounds by how many sequences it multiplies at once."""
    return (torch.equal if by is recurrence else torch.allclose)(found, expected)


def close(found, expected, dtype):
    """To one unit in the last place of a half, or half of one; in float32 to 32 roundings of 2^-24.

    As much again absolutely: numbers are of size one.
    """
    steps = {FLOAT: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(found, expected, rtol=steps, atol=steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES)
@pytest.mark.parametrize("dtype", [FLOAT, *HALVES])
@pytest.mark.parametrize("kept", [FLOAT, *HALVES])
def test_equals_torch(kind, key_dim, value_dim, dtype, kept):
    batch = random(kind, key_dim=key_dim, value_dim=value_dim, shared=2).to(dtype, kept)
    out, state = batch.run(recurrence)
    right, right_state = batch.to(torch.float64, torch.float64).run(in_torch.recurrence)
    close(out, right, dtype)
    close(state, right_state, kept)


@pytest.mark.parametrize("by", [recurrence, in_torch.recurrence])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_dim", [128, 40])
def test_a_prompt_in_pieces_is_the_prompt(by, kind, key_dim):
    whole = random(kind, lengths=(70,), fresh=(True,), key_dim=key_dim).to(FLOAT, FLOAT)
    out, state = whole.run(by)
    kept, pieces = whole.state, []
    for begin, end in ((0, 1), (1, 17), (17, 49), (49, 50), (50, 70)):
        tokens = {name: getattr(whole, name)[begin:end] for name in "qkv"}
        decay = whole.decay if kind == "constant" else whole.decay[begin:end]
        piece = whole.part(
            **tokens,
            decay=decay,
            beta=None if whole.beta is None else whole.beta[begin:end],
            state=kept,
            starts=torch.tensor([0, end - begin]),
            has_history=torch.tensor([begin > 0]),
        )
        answer, kept = piece.run(by)
        kept = kept.float()
        pieces.append(answer)
    assert same(by, torch.cat(pieces), out)
    assert same(by, kept.double(), state)


@pytest.mark.parametrize("by", [recurrence, in_torch.recurrence])
def test_what_is_in_a_fresh_sequences_block_is_forgotten(by):
    batch = random(fresh=(True,) * 4).to(FLOAT, FLOAT)
    spoilt = batch.part(state=torch.full_like(batch.state, torch.nan))
    out, state = batch.run(by)
    again, after = spoilt.run(by)
    assert torch.equal(out, again)
    assert torch.equal(state[batch.slots], after[batch.slots])


@pytest.mark.parametrize("by", [recurrence, in_torch.recurrence])
@pytest.mark.parametrize("padding", [0, -1])
def test_padding_is_left_out(by, padding):
    batch = random().to(FLOAT, FLOAT)
    slots = batch.slots.clone()
    slots[1] = padding
    out, state = batch.part(slots=slots, starts=batch.starts).run(by)
    right, right_state = batch.run(by)
    right[1:21] = 0
    right_state[batch.slots[1]] = batch.state[batch.slots[1]].double()
    assert same(by, out, right)
    assert same(by, state, right_state)


@pytest.mark.parametrize("by", [recurrence, in_torch.recurrence])
@pytest.mark.parametrize("count", [2, 0])
def test_tokens_behind_the_last_sequence_are_zero(by, count):
    """And the states of no sequence are as they were, also where there is none at all."""
    batch = random().to(FLOAT, FLOAT)
    own = {name: getattr(batch, name)[:count] for name in ("slots", "has_history")}
    out, state = batch.part(**own, starts=batch.starts[: count + 1]).run(by)
    end, others = batch.starts[count], batch.slots[count:]
    assert same(by, out[:end], batch.run(by)[0][:end])
    assert not out[end:].any()
    assert torch.equal(state[others], batch.state[others].double())


def test_views_as_vllm_has_them():
    """Projections side by side, and a cache whose blocks have something between them."""
    batch = random(lengths=(3, 9), fresh=(False, True)).to(FLOAT, FLOAT)
    heads, size = batch.v.shape[1:]
    mixed = torch.cat([x.flatten(1) for x in (batch.q, batch.k, batch.v)], dim=1)
    views = [x.unflatten(-1, (heads, size)) for x in mixed.chunk(3, dim=1)]
    pages = torch.randn(len(batch.state), batch.state[0].numel() + 7)
    cache = pages[:, 7:].view_as(batch.state)
    cache.copy_(batch.state)
    before = pages.clone()
    given = vars(batch) | dict(zip("qkv", views, strict=True)) | {"state": cache}
    assert not views[0].is_contiguous() and not cache.is_contiguous()
    assert torch.equal(recurrence(**given).double(), batch.run(recurrence)[0])
    assert torch.equal(cache.double(), batch.run(recurrence)[1])
    assert torch.equal(pages[:, :7], before[:, :7])


def test_threads_change_nothing():
    batch = random(key_dim=128, value_dim=128, heads=8).to(FLOAT, FLOAT)
    threads = torch.get_num_threads()
    answers = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            answers.append(batch.run(recurrence))
    finally:
        torch.set_num_threads(threads)
    (out, state), (again, after) = answers
    assert torch.equal(out, again) and torch.equal(state, after)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("slots", lambda x: x + 100, "outside of its tokens or blocks"),
        ("starts", lambda x: x + 1, "outside of its tokens or blocks"),
        ("starts", lambda x: x.flip(0), "outside of its tokens or blocks"),
        ("starts", lambda x: x[1:], "do not fit each other"),
        ("k", lambda x: x[..., 1:], "do not fit each other"),
        ("k", lambda x: x[1:], "do not fit each other"),
        ("q", lambda x: x[1:], "do not fit each other"),
        ("beta", lambda x: x[1:], "do not fit each other"),
        ("beta", lambda x: x[:, 1:], "do not fit each other"),
        ("slots", lambda x: x.short(), "must be int32 or int64"),
        ("has_history", lambda x: x.int(), "must be bool"),
        ("decay", lambda x: x.double(), "must be float32"),
        ("state", lambda x: x.mT, "must be contiguous"),
        ("v", lambda x: x.double(), "takes float32, bfloat16 and float16"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, says):
    batch = random().to(FLOAT, FLOAT)
    with pytest.raises(RuntimeError, match=says):
        batch.part(**{name: change(getattr(batch, name))}).run(recurrence)


def test_without_a_compiler_torch_runs(monkeypatch):
    def fail(dtypes: tuple) -> None:
        raise BackendError("no compiler here")

    monkeypatch.setattr(cpp, "_load", fail)
    monkeypatch.setattr(cpp, "_ready", False)
    assert cpp.problem() == "no compiler here"
    batch = random().to(FLOAT, FLOAT)
    out, state = batch.run(recurrence)
    right, right_state = batch.run(in_torch.recurrence)
    assert torch.equal(out, right) and torch.equal(state, right_state)
