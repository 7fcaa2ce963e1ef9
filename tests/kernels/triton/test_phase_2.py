"""Phase 2 of two-phase in Triton against the float64 run of its specification."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    KEY_EPS,
    NORM_EPS,
    ROUNDINGS,
    half_ulp,
    mix_error,
    rounding_of_the_answer,
)
from torch import Tensor
from triton_cases import (  # noqa: F401
    Case,
    Inputs,
    Spy,
    cases,
    close,
    floats,
    gain,
    make_inputs,
    poison,
    zeros,
)
from triton_interpreter import (
    LAYOUTS,
    ON_GPU,
    RUNNABLE,
    bits,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
    poisoned,
)

from attnres_serve.kernels import reference
from attnres_serve.kernels.triton import common as triton_common
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import MOST_LOST, single_pass

pytestmark = pytest.mark.usefixtures("interpreter")


def _answers(inputs: Inputs, count: int) -> tuple[Tensor, Tensor]:
    """Exact answers of all sites over the first rows, rounded, and their log-sum-exps."""
    blocks = inputs.blocks()[:count]
    answers, log_sums = reference.phase_1(blocks, inputs.queries, KEY_EPS, torch.float64)
    return answers.to(inputs.bank.dtype), log_sums.float()


def _compare_merge(case: Case) -> None:
    """Run a merge and hold state, untouched memory and result to the reference.

    The answers are exact ones, rounded: what that rounding costs is the next test's.
    """
    inputs = make_inputs(replace(case, spare=case.spare + 1))  # a row for the partial sum
    first = max(1, case.count - case.late)
    blocks, late = inputs.blocks()[:first], inputs.blocks()[first:]
    exact = reference.phase_1(blocks, inputs.queries, KEY_EPS, torch.float64)
    holes, answers = poisoned((case.sites, case.tokens, case.hidden), case.layout, case.dtype)
    position = case.seed % case.sites
    answers[position] = exact[0][position].to(case.dtype)  # other sites' answers stay NaN
    log_sums = exact[1].float()
    row, query, delta = case.count, inputs.queries[position], inputs.vectors()
    if not case.fresh:
        inputs.bank[:, row] = inputs.random(case.tokens, case.hidden)
    out_storage, out = poisoned((case.tokens, case.hidden), case.layout, case.dtype)

    before = None if case.fresh else inputs.bank[:, row].clone()
    partial = reference.add_partial(before, delta)
    state = inputs.storage.clone()
    view = state.as_strided(inputs.bank.shape, inputs.bank.stride(), inputs.bank.storage_offset())
    view[:, row] = partial
    kept = [(tensor, tensor.clone()) for tensor in (delta, holes, log_sums)]
    returned = phase_2(
        delta,
        inputs.bank,
        answers,
        log_sums,
        query,
        inputs.norm_weight,
        row=row,
        position=position,
        fresh=case.fresh,
        key_eps=KEY_EPS,
        norm_eps=NORM_EPS,
        first=first if late else None,
        bias=inputs.bias,
        out=out,
    )

    assert returned is out
    assert torch.equal(bits(inputs.storage), bits(state)), "state or untouched rows"
    for tensor, value in kept:
        assert torch.equal(bits(tensor), bits(value)), "an argument was written to"
    assert int(out_storage.isnan().sum()) == out_storage.numel() - out.numel(), "padding or holes"
    answer, log_sum = answers[position].double(), log_sums[position].double()
    rows = torch.stack([*late, partial], 1).double()
    scores = reference.scores(rows, query.double(), KEY_EPS)
    scores[:, -1] += case.bias or 0
    weights = torch.softmax(torch.cat([log_sum[:, None], scores], 1), -1)
    sources = torch.cat([answer[:, None], rows], 1)
    mixed = (weights[..., None] * sources).sum(1)
    expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
    rms = (rows.square().mean(-1) + KEY_EPS).sqrt()
    terms = (rows * query.double()).square().sum(-1).sqrt() / rms
    condition = 1 + (terms + scores.abs()).amax(1) + log_sum.abs() + abs(case.bias or 0)
    largest = sources.abs().amax((1, 2))
    error = (ROUNDINGS * 2**-24 * condition * largest)[:, None]
    error *= gain(mixed, inputs.norm_weight)
    close(out, expected, half_ulp(expected, case.dtype) + error)


@settings(max_examples=40, deadline=None)
@given(
    cases(
        count=st.integers(1, 16),
        sites=st.integers(1, 4),
        hidden=st.sampled_from((1, 3, 64, 257, 1000, 4097)),
        bias=st.sampled_from((None, 0.7, -3.0)),
        fresh=st.booleans(),
        late=st.sampled_from((0, 0, 1, 2, 5)),
        weight_dtype=st.sampled_from((None, *DTYPES)),
    )
)
def test_merge_over_the_grid(case: Case) -> None:
    """Any mix of shape, dtype, layout, magnitude and bias."""
    _compare_merge(case)


@pytest.mark.parametrize("fresh", [False, True], ids=["adds", "begins"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        # The partial sum in the last row of the bank, whatever its layout.
        *(Case(spare=0, layout=layout) for layout in LAYOUTS),
        # Scores of several tens, to either side of the log-sum-exp.
        *(Case(query_scale=4.0, seed=seed) for seed in range(4)),
        # One row finished since phase 1, all but the first, and more than a tile.
        Case(late=1),
        Case(late=3, layout="slots first"),
        Case(count=8, late=5, spare=0, bias=0.7),
        # The last source alone has the bias.
        Case(late=2, bias=30.0),
        Case(late=2, bias=-30.0),
        Case(bias=30.0),
        Case(bias=-30.0),
        Case(bias=200.0),
        Case(bias=-200.0),
        Case(scale=1e15),
        Case(scale=1e-20),
        Case(tokens=0),
    ],
    ids=str,
)
def test_phase_2_rows(case: Case, fresh: bool) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare_merge(replace(case, fresh=fresh))


def _merge_into_a_block(inputs: Inputs, delta: Tensor) -> Tensor:
    """A partial sum that begins with ``delta``, and the answer over the only block."""
    answers = _answers(inputs, 1)
    options = {"row": 1, "position": 1, "fresh": True, "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
    tensors = delta, inputs.bank, *answers, inputs.queries[1], inputs.norm_weight
    return phase_2(*tensors, **options, bias=inputs.bias)


@pytest.mark.parametrize("bias", [None, 0.7])
@pytest.mark.parametrize("left", [0.5, 0.42, 2**-2, 2**-4, 2**-8, 2**-12, 0.0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_partial_sum_that_cancels_the_answer(
    dtype: torch.dtype, left: float, bias: float | None
) -> None:
    """``left`` of the mix remains; its square is a difference only where little is lost."""
    inputs = make_inputs(Case(dtype=dtype, count=1, query_scale=0.0, bias=bias))  # no scores
    block = inputs.bank[:, 0].clone()
    weights = torch.softmax(torch.tensor([0.0, bias or 0.0], dtype=torch.float64), 0)
    delta = ((left - 1) * float(weights[0] / weights[1]) * block.double()).to(dtype)
    actual = _merge_into_a_block(inputs, delta)
    parts = [weights[0] * block.double(), weights[1] * delta.double()]
    mixed = parts[0] + parts[1]
    expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
    apart = sum(part.square().sum(-1, keepdim=True) for part in parts)
    lost = apart / mixed.square().sum(-1, keepdim=True)
    lost = torch.where(lost < float(MOST_LOST.value), lost, 1.0)
    largest = torch.stack(parts).abs().amax((0, 2))[:, None]
    error = lost * expected.abs() + gain(mixed, inputs.norm_weight) * largest
    close(actual, expected, half_ulp(expected, dtype) + ROUNDINGS * 2**-24 * error)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("huge", ["partial", "answer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_source_whose_square_is_infinite(dtype: torch.dtype, huge: str) -> None:
    """Without weight it changes nothing."""
    bias = -200.0 if huge == "partial" else 200.0
    inputs = make_inputs(Case(dtype=dtype, count=1, query_scale=0.0, bias=bias))
    delta = inputs.vectors()
    (delta if huge == "partial" else inputs.bank[:, 0]).fill_(1e20)
    kept = (inputs.bank[:, 0] if huge == "partial" else delta).double()
    actual = _merge_into_a_block(inputs, delta)
    expected = reference.rms_norm(kept, inputs.norm_weight, NORM_EPS)
    close(actual, expected, half_ulp(expected, dtype) + ROUNDINGS * 2**-24 * expected.abs())


# A whole block


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "layout"), [(1, "padded"), (2, "dense"), (6, "padded"), (15, "slots first")]
)
def test_a_block_of_sites(count: int, dtype: torch.dtype, layout: str) -> None:
    """Sites of a block in order: exact state, and results within the stated rounding.

    The partial sum is in the bank's last row.
    """
    case = Case(count=count, sites=6, dtype=dtype, layout=layout, scale=3.0, seed=count)
    inputs = make_inputs(case)
    blocks, partial = inputs.blocks(), None
    answers = _answers(inputs, count)
    for site, query in enumerate(inputs.queries):
        delta = inputs.vectors()
        partial = reference.add_partial(partial, delta.clone())
        sources = [*blocks, partial]
        out = phase_2(
            delta,
            inputs.bank,
            *answers,
            query,
            inputs.norm_weight,
            row=count,
            position=site,
            fresh=site == 0,
            key_eps=KEY_EPS,
            norm_eps=NORM_EPS,
        )
        assert torch.equal(bits(inputs.bank[:, count]), bits(partial))
        assert out.dtype == dtype and out.is_contiguous()
        mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
        expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
        # Two scores stand behind a merge, one in each phase.
        error = 2 * gain(mixed, inputs.norm_weight) * mix_error(sources, query)
        cost = rounding_of_the_answer(sources, query, inputs.norm_weight, dtype, count)
        close(out, expected, half_ulp(expected, dtype) + error + cost)
    assert torch.equal(bits(torch.stack(blocks, 1)), bits(inputs.bank[:, :count]))


def test_a_group_of_several_blocks() -> None:
    """Blocks of one sublayer: an answer serves sites at which rows were finished since."""
    case = Case(count=2, sites=4, spare=5, seed=5)
    inputs = make_inputs(case)
    answers = _answers(inputs, 2)
    blocks = inputs.blocks()
    for site, query in enumerate(inputs.queries):
        delta = inputs.vectors()
        common = {"row": 2 + site, "fresh": True, "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
        tensors = delta, inputs.bank, *answers, query, inputs.norm_weight
        out = phase_2(*tensors, position=site, first=2, **common)
        blocks.append(delta.clone())
        assert torch.equal(bits(inputs.bank[:, : 3 + site]), bits(torch.stack(blocks, 1)))
        mixed, _ = reference.mix(blocks, query, KEY_EPS, torch.float64)
        expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
        error = 2 * gain(mixed, inputs.norm_weight) * mix_error(blocks, query)
        cost = rounding_of_the_answer(blocks, query, inputs.norm_weight, case.dtype, 2)
        close(out, expected, half_ulp(expected, case.dtype) + error + cost)


def test_both_algorithms_keep_the_same_state() -> None:
    """Two-phase leaves the bank that the single pass leaves, bit for bit."""
    one, two = make_inputs(Case(spare=2)), make_inputs(Case(spare=2))
    answers = _answers(two, 4)
    for site, fresh in enumerate((True, False, False)):
        delta = one.vectors()
        common = {"row": 4, "fresh": fresh, "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
        first = single_pass(delta, one.bank, one.queries[site], one.norm_weight, **common)
        tensors = delta, two.bank, *answers, two.queries[site], two.norm_weight
        second = phase_2(*tensors, **common, position=site)
        assert torch.equal(bits(one.storage), bits(two.storage))
        torch.testing.assert_close(first, second, rtol=2**-6, atol=2**-7)


# Contracts

KERNEL = triton_single_pass, "site_kernel"


def test_one_launch_and_none_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch has a program for each token."""
    spy = Spy()
    monkeypatch.setattr(*KERNEL, spy)
    phase_2(**_arguments())
    assert phase_2(**_arguments(tokens=0)).shape == (0, 96)
    assert spy.grids == [(4,)]


def _arguments(tokens: int = 4, **changes: object) -> dict[str, object]:
    """Valid arguments of ``phase_2``, with changes."""
    return {
        "delta": zeros(tokens, 96),
        "bank": zeros(tokens, 5, 96),
        "answers": zeros(2, tokens, 96),
        "log_sums": floats(2, tokens),
        "query": floats(96),
        "norm_weight": zeros(96),
        "row": 4,
        "position": 1,
        "fresh": False,
        "key_eps": 1e-6,
        "norm_eps": 1e-5,
    } | changes


def _half(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float16)


REFUSALS = {
    "answers of another dtype": (
        lambda: phase_2(**_arguments(answers=_half(2, 4, 96))),
        r"answers is \[2, 4, 96\] torch.float16, not \[2, 4, 96\] torch.bfloat16",
    ),
    "answers of other tokens": (
        lambda: phase_2(**_arguments(answers=zeros(2, 3, 96))),
        r"answers is \[2, 3, 96\]",
    ),
    "one answer": (
        lambda: phase_2(**_arguments(answers=zeros(4, 96))),
        r"answers must be \[sites, tokens, hidden\], not \[4, 96\]",
    ),
    "sums in a half": (
        lambda: phase_2(**_arguments(log_sums=zeros(2, 4))),
        r"log_sums is \[2, 4\] torch.bfloat16, not \[2, 4\] torch.float32",
    ),
    "sums elsewhere": (
        lambda: phase_2(**_arguments(log_sums=torch.empty(2, 4, device="meta"))),
        "log_sums is on meta",
    ),
    "no such site": (
        lambda: phase_2(**_arguments(position=2)),
        "position 2 is outside the 2 sites of phase 1",
    ),
    "no such row": (lambda: phase_2(**_arguments(row=5)), "row 5 is outside the 5 slots"),
    "an answer for later rows": (
        lambda: phase_2(**_arguments(first=5)),
        "first 5 is outside 0..4, the row of the partial sum",
    ),
    "negative position": (
        lambda: phase_2(**_arguments(position=-1)),
        "position -1 is outside",
    ),
    "negative first": (lambda: phase_2(**_arguments(first=-1)), "first -1 is outside 0..4"),
    "strided answers": (
        lambda: phase_2(**_arguments(answers=zeros(2, 4, 192)[..., ::2])),
        "answers must have unit stride",
    ),
    "expanded bank": (
        lambda: phase_2(**_arguments(bank=zeros(1, 5, 96).expand(4, 5, 96))),
        "bank is written and its rows overlap",
    ),
    "bias in a half": (lambda: phase_2(**_arguments(bias=zeros(1))), r"bias is \[1\] torch.b"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    call, sentence = REFUSALS[name]
    monkeypatch.setattr(*KERNEL, None)
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_refuses_results_that_share_memory() -> None:
    """Writing a result must not change what another program still reads."""
    for name in ("delta", "answers"):
        arguments = _arguments()
        shared = arguments[name] if name == "delta" else arguments[name][0]
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            phase_2(**arguments, out=shared)


@pytest.mark.skipif(ON_GPU, reason="needs tensors without a Triton backend")
def test_refuses_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names both ways out."""
    monkeypatch.setattr(triton_common, "INTERPRETED", False)
    with pytest.raises(ValueError, match="torch path, or set TRITON_INTERPRET=1 before"):
        phase_2(**_arguments())


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_two_phase_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
