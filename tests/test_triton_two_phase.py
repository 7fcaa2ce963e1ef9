"""The Triton kernels of two-phase against the float64 run of their specification."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, ROUNDINGS, mix_error
from torch import Tensor
from triton_interpreter import (
    DEVICE,
    LAYOUTS,
    ON_GPU,
    RUNNABLE,
    bits,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
    poisoned,
)

from attnres_serve.kernels import reference, triton_common, triton_two_phase
from attnres_serve.kernels.triton_common import MAX_HIDDEN
from attnres_serve.kernels.triton_single_pass import single_pass
from attnres_serve.kernels.triton_two_phase import GroupConfig, inter_block, merge, norm_answer

pytestmark = pytest.mark.usefixtures("interpreter")


@dataclass(frozen=True)
class Case:
    """``sites`` sites over ``count`` finished blocks of ``tokens`` x ``hidden``."""

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
        return [self.bank[:, i].clone() for i in range(self.case.count)]


def _inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, case.count + case.spare, case.hidden)
    storage, bank = poisoned(shape, case.layout, case.dtype)
    queries = torch.randn(case.sites, case.hidden, generator=generator) * case.query_scale
    weight = torch.randn(case.hidden, generator=generator).to(case.weight_dtype or case.dtype)
    bias = None if case.bias is None else torch.tensor([case.bias], device=DEVICE)
    inputs = Inputs(storage, bank, queries.to(DEVICE), weight.to(DEVICE), bias, generator, case)
    bank[:, : case.count] = inputs.random(case.tokens, case.count, case.hidden)
    return inputs


def _half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding to ``dtype`` may change."""
    limits = torch.finfo(dtype)
    return values.abs().clamp(min=limits.smallest_normal) * (limits.eps / 2)


def _close(actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    assert not actual.isnan().any()
    if actual.numel():
        worst = ((actual.double() - expected).abs() / tolerance).max()
        assert worst <= 1, f"{float(worst):.3g} times the tolerance"


def _gain(mixed: Tensor, norm_weight: Tensor) -> Tensor:
    """By how much the output norm magnifies an error of the mix, ``[T, 1]``."""
    root = (mixed.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return norm_weight.double().abs().max() / root


# Phase 1


def _compare_inter_block(case: Case) -> None:
    """Run phase 1 and hold answers, log-sum-exps and untouched memory to the reference."""
    inputs = _inputs(case)
    before = inputs.storage.clone()
    # Room for a whole group behind the last site, which must stay NaN.
    shape = case.sites + 4, case.tokens, case.hidden
    holes, answers = poisoned(shape, case.layout, case.dtype)
    sums = torch.full(shape[:2], torch.nan, device=DEVICE)
    if case.layout != "padded":
        sums = sums.t().contiguous().t()
    answers, log_sums = answers[: case.sites], sums[: case.sites]

    returned = inter_block(
        inputs.bank, inputs.queries, count=case.count, key_eps=KEY_EPS, out=(answers, log_sums)
    )

    assert returned[0] is answers and returned[1] is log_sums
    assert torch.equal(bits(inputs.storage), bits(before)), "phase 1 writes to no row"
    assert int(holes.isnan().sum()) == holes.numel() - answers.numel(), "padding or holes"
    assert int(sums.isnan().sum()) == sums.numel() - log_sums.numel(), "sites that are none"
    blocks = inputs.blocks()
    expected = reference.inter_block(blocks, inputs.queries, KEY_EPS, torch.float64)
    stacked = torch.stack(blocks, dim=1).double()
    for site, query in enumerate(inputs.queries):
        error = mix_error(blocks, query)  # [T, 1]
        _close(answers[site], expected[0][site], _half_ulp(expected[0][site], case.dtype) + error)
        largest = stacked.abs().amax((1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
        # The error of a score: that of the mix without the source it multiplies.
        _close(log_sums[site], expected[1][site], error[:, 0] / largest)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        tokens=st.sampled_from((1, 3)),
        count=st.integers(1, 16),
        sites=st.sampled_from((1, 2, 3, 4, 5, 9)),
        hidden=st.sampled_from((1, 3, 64, 257, 1000)),
        dtype=st.sampled_from(DTYPES),
        layout=st.sampled_from(LAYOUTS),
        spare=st.integers(0, 2),
        scale=st.sampled_from((1.0, 1e4, 1e-4, 1e-6)),
        query_scale=st.sampled_from((0.0, 0.05, 1.0)),
        seed=st.integers(0, 2**31),
    )
)
def test_inter_block_over_the_grid(case: Case) -> None:
    """Any mix of shape, dtype, layout and magnitude."""
    _compare_inter_block(case)


ROWS = [
    # One block: the answer is the block, whatever its score.
    Case(count=1),
    # Fewer sites than a program answers, exactly as many, one more.
    Case(sites=1),
    Case(sites=4),
    Case(sites=5),
    # Every padded size has a config of its own; odd sizes fill no vector.
    Case(hidden=1),
    Case(hidden=300, sites=5),
    Case(hidden=1025, sites=5),
    Case(hidden=4097, tokens=1),
    Case(hidden=8193, tokens=1, count=2),
    # No row behind the last, so that a read past it would leave the bank.
    Case(spare=0, layout="slots first"),
    # Equal scores: a plain mean, and the log-sum-exp is the logarithm of the count.
    Case(query_scale=0.0, count=7),
    # Scores of several tens: one weight takes all, the others underflow.
    Case(query_scale=4.0, count=8),
    # Magnitudes at which a mean square overflows fp16 and at which eps outweighs it.
    Case(scale=1e4),
    Case(scale=1e-6),
    # Nothing to do.
    Case(tokens=0),
]
WIDE_ROWS = [Case(scale=1e15), Case(scale=1e-20)]  # beyond the range of half precision
EVERY = [replace(row, dtype=dtype) for row, dtype in product(ROWS, DTYPES)]
EVERY += [replace(r, dtype=t) for r, t in product(WIDE_ROWS, (torch.float32, torch.bfloat16))]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_inter_block_rows(case: Case) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare_inter_block(case)


def test_a_dominating_score_selects_its_block() -> None:
    """A block along a long query is the answer, wherever it stands; another site is not moved."""
    for chosen in range(4):
        inputs = _inputs(Case())
        inputs.bank[:, chosen] = inputs.queries[1].to(torch.bfloat16)
        inputs.queries[1] *= 50
        answers, log_sums = inter_block(inputs.bank, inputs.queries, count=4, key_eps=KEY_EPS)
        assert torch.equal(answers[1], inputs.bank[:, chosen])
        exact, _ = reference.mix(inputs.blocks(), inputs.queries[0], KEY_EPS, torch.float64)
        torch.testing.assert_close(answers[0].double(), exact, rtol=2**-7, atol=1e-5)
        scores = reference.scores(inputs.bank[:, chosen].float(), inputs.queries[1], KEY_EPS)
        torch.testing.assert_close(log_sums[1], scores)


def test_an_answer_does_not_depend_on_its_company() -> None:
    """A site alone and a token alone get the bits that they get among others."""
    inputs = _inputs(Case(sites=5))
    together = inter_block(inputs.bank, inputs.queries, count=4, key_eps=KEY_EPS)
    for site in range(5):
        alone = inter_block(inputs.bank, inputs.queries[site, None], count=4, key_eps=KEY_EPS)
        assert torch.equal(alone[0][0], together[0][site])
        assert torch.equal(alone[1][0], together[1][site])
    alone = inter_block(inputs.bank[1:2], inputs.queries, count=4, key_eps=KEY_EPS)
    assert torch.equal(alone[0][:, 0], together[0][:, 1])
    assert torch.equal(alone[1][:, 0], together[1][:, 1])


@pytest.mark.parametrize("config", [(1, 1), (2, 2), (8, 4)], ids=str)
def test_group_configs_agree(config: tuple[int, int]) -> None:
    """Groups that divide the number of sites, do not, and exceed it."""
    inputs = _inputs(Case(sites=5, dtype=torch.float32))
    arguments = {"count": 4, "key_eps": KEY_EPS}
    expected = inter_block(inputs.bank, inputs.queries, **arguments)
    actual = inter_block(inputs.bank, inputs.queries, **arguments, config=GroupConfig(*config))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# Phase 2


def _compare_merge(case: Case) -> None:
    """Run a merge and hold state, untouched memory and result to the reference.

    The answers are exact ones, rounded: what that rounding costs is the next test's.
    """
    inputs = _inputs(replace(case, spare=case.spare + 1))  # a row for the partial sum
    exact = reference.inter_block(inputs.blocks(), inputs.queries, KEY_EPS, torch.float64)
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
    returned = merge(
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
        bias=inputs.bias,
        out=out,
    )

    assert returned is out
    assert torch.equal(bits(inputs.storage), bits(state)), "state or untouched rows"
    for tensor, value in kept:
        assert torch.equal(bits(tensor), bits(value)), "an argument was written to"
    assert int(out_storage.isnan().sum()) == out_storage.numel() - out.numel(), "padding or holes"
    answer, log_sum, own = answers[position].double(), log_sums[position].double(), partial.double()
    mixed = reference.merge(answer, log_sum, partial, query, KEY_EPS, inputs.bias)
    expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
    rms = (own.square().mean(-1) + KEY_EPS).sqrt()
    terms = (own * query.double()).square().sum(-1).sqrt() / rms
    score = reference.scores(own, query.double(), KEY_EPS).abs()
    condition = 1 + terms + score + log_sum.abs() + abs(case.bias or 0)
    largest = torch.maximum(answer.abs(), own.abs()).amax(1) if case.tokens else condition
    error = (ROUNDINGS * 2**-24 * condition * largest)[:, None]
    gain = _gain(mixed, inputs.norm_weight)
    _close(out, expected, _half_ulp(expected, case.dtype) + gain * error)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        tokens=st.sampled_from((1, 3)),
        count=st.integers(1, 16),
        sites=st.integers(1, 4),
        hidden=st.sampled_from((1, 3, 64, 257, 1000, 4097)),
        dtype=st.sampled_from(DTYPES),
        layout=st.sampled_from(LAYOUTS),
        spare=st.integers(0, 2),
        scale=st.sampled_from((1.0, 1e4, 1e-4, 1e-6)),
        query_scale=st.sampled_from((0.0, 0.05, 1.0)),
        bias=st.sampled_from((None, 0.7, -3.0)),
        fresh=st.booleans(),
        weight_dtype=st.sampled_from((None, *DTYPES)),
        seed=st.integers(0, 2**31),
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
def test_merge_rows(case: Case, fresh: bool) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare_merge(replace(case, fresh=fresh))


# A whole block


def _rounding_of_the_answer(
    sources: list[Tensor], query: Tensor, norm_weight: Tensor, dtype: torch.dtype, finished: int
) -> Tensor:
    """What it may cost that the answer was rounded to ``dtype``, ``[T, d]``.

    Beside a partial sum of weight w the mix moves by (1 - w) times half a unit of the answer, and
    by its root mean square the norm's factor.
    """
    mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
    logits = reference.scores(torch.stack(sources, 1).double(), query.double(), KEY_EPS)
    rest = torch.softmax(logits, -1)[:, :finished].sum(-1, keepdim=True)
    answer, _ = reference.mix(sources[:finished], query, KEY_EPS, torch.float64)
    moved = rest * _half_ulp(answer, dtype)
    factor = (mixed.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    relative = factor * moved.square().mean(-1, keepdim=True).sqrt()
    second_order = 1 + 3 * relative
    return norm_weight.double().abs() * factor * (moved + mixed.abs() * relative) * second_order


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functions allocate holds NaN until a kernel writes it."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *arguments, **options) -> Tensor:
        tensor = new_empty(self, *arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "layout"), [(1, "padded"), (2, "dense"), (6, "padded"), (15, "slots first")]
)
def test_a_block_of_sites(count: int, dtype: torch.dtype, layout: str) -> None:
    """All sites of a block in order: exact state, and results within the stated rounding.

    The partial sum is in the bank's last row.
    """
    case = Case(count=count, sites=6, dtype=dtype, layout=layout, scale=3.0, seed=count)
    inputs = _inputs(case)
    inputs.bank[:, count - 1] += inputs.vectors()
    blocks, partial = inputs.blocks(), None
    answers = inter_block(inputs.bank, inputs.queries, count=count, key_eps=KEY_EPS)
    for site, query in enumerate(inputs.queries):
        if site == 0:
            sources = blocks
            out = norm_answer(answers[0], inputs.norm_weight, position=0, norm_eps=NORM_EPS)
        else:
            delta = inputs.vectors()
            partial = reference.add_partial(partial, delta.clone())
            sources = [*blocks, partial]
            out = merge(
                delta,
                inputs.bank,
                *answers,
                query,
                inputs.norm_weight,
                row=count,
                position=site,
                fresh=site == 1,
                key_eps=KEY_EPS,
                norm_eps=NORM_EPS,
            )
            assert torch.equal(bits(inputs.bank[:, count]), bits(partial))
        assert out.dtype == dtype and out.is_contiguous()
        mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
        expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
        # Two scores stand behind a merge, one in each phase.
        error = 2 * _gain(mixed, inputs.norm_weight) * mix_error(sources, query)
        cost = _rounding_of_the_answer(sources, query, inputs.norm_weight, dtype, count)
        _close(out, expected, _half_ulp(expected, dtype) + error + cost)
    assert torch.equal(bits(torch.stack(blocks, 1)), bits(inputs.bank[:, :count]))


def test_both_algorithms_keep_the_same_state() -> None:
    """Two-phase leaves the bank that the single pass leaves, bit for bit."""
    one, two = _inputs(Case(spare=2)), _inputs(Case(spare=2))
    answers = inter_block(two.bank, two.queries, count=4, key_eps=KEY_EPS)
    for site, fresh in enumerate((True, False, False)):
        delta = one.vectors()
        common = {"row": 4, "fresh": fresh, "key_eps": KEY_EPS, "norm_eps": NORM_EPS}
        first = single_pass(delta, one.bank, one.queries[site], one.norm_weight, **common)
        tensors = delta, two.bank, *answers, two.queries[site], two.norm_weight
        second = merge(*tensors, **common, position=site)
        assert torch.equal(bits(one.storage), bits(two.storage))
        torch.testing.assert_close(first, second, rtol=2**-6, atol=2**-7)


# Contracts


class Spy:
    """In place of a kernel: the grids it is launched on."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda **arguments: None


def test_one_launch_each_and_none_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase 1 is one launch of a program per token and group, the others of one per token."""
    spies = [Spy(), Spy(), Spy()]
    for name, spy in zip(("inter_block", "merge", "norm_answer"), spies, strict=True):
        monkeypatch.setattr(triton_two_phase, f"{name}_kernel", spy)
    for tokens, sites in ((4, 9), (4, 0), (0, 9)):
        inter_block(**_phase_1(bank=_zeros(tokens, 5, 96), queries=_zeros(sites, 96).float()))
    assert spies[0].grids == [(12,)]  # three groups of four
    merge(**_phase_2())
    assert merge(**_phase_2(tokens=0)).shape == (0, 96)
    assert spies[1].grids == [(4,)]
    norm_answer(**_norming())
    assert norm_answer(**_norming(answers=_zeros(2, 0, 96))).shape == (0, 96)
    assert spies[2].grids == [(4,)]
    assert [len(spy.grids) for spy in spies] == [1, 1, 1]


def test_no_stride_of_a_result_depends_on_the_tokens() -> None:
    """Strides are specialised by Triton: with another batch there would be another binary."""
    shapes = {}
    for tokens in (2, 5):
        answers, _ = inter_block(**_phase_1(bank=_zeros(tokens, 5, 96)))
        shapes[tokens] = answers.stride()
    assert shapes[2] == shapes[5]


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def _floats(*shape: int) -> Tensor:
    return _zeros(*shape, dtype=torch.float32)


def _phase_1(**changes: object) -> dict[str, object]:
    """Valid arguments of ``inter_block``, with changes."""
    arguments = {"bank": _zeros(4, 5, 96), "queries": _floats(2, 96), "count": 3, "key_eps": 1e-6}
    return arguments | changes


def _phase_2(tokens: int = 4, **changes: object) -> dict[str, object]:
    """Valid arguments of ``merge``, with changes."""
    return {
        "delta": _zeros(tokens, 96),
        "bank": _zeros(tokens, 5, 96),
        "answers": _zeros(2, tokens, 96),
        "log_sums": _floats(2, tokens),
        "query": _floats(96),
        "norm_weight": _zeros(96),
        "row": 4,
        "position": 1,
        "fresh": False,
        "key_eps": 1e-6,
        "norm_eps": 1e-5,
    } | changes


def _norming(**changes: object) -> dict[str, object]:
    """Valid arguments of ``norm_answer``, with changes."""
    arguments = {"answers": _zeros(2, 4, 96), "norm_weight": _zeros(96)}
    return arguments | {"position": 1, "norm_eps": 1e-5} | changes


def _half(*shape: int) -> Tensor:
    return _zeros(*shape, dtype=torch.float16)


REFUSALS = {
    "a flat bank": (
        lambda: inter_block(**_phase_1(bank=_zeros(4, 96))),
        r"bank must be \[tokens, slots, hidden\] and queries \[sites, hidden\], not \[4, 96\]",
    ),
    "one query": (
        lambda: inter_block(**_phase_1(queries=_floats(96))),
        r"and queries \[sites, hidden\], not \[4, 5, 96\] and \[96\]",
    ),
    "too large a hidden size": (
        lambda: inter_block(**_phase_1(bank=_zeros(1, 3, MAX_HIDDEN + 1))),
        f"hidden size {MAX_HIDDEN + 1} is outside",
    ),
    "an integer bank": (
        lambda: inter_block(**_phase_1(bank=_zeros(4, 5, 96, dtype=torch.int8))),
        "bank is torch.int8, not float32",
    ),
    "queries in a half": (
        lambda: inter_block(**_phase_1(queries=_zeros(2, 96))),
        "queries is torch.bfloat16; it is folded",
    ),
    "queries of another size": (
        lambda: inter_block(**_phase_1(queries=_floats(2, 95))),
        r"queries is \[2, 95\], not \[2, 96\]",
    ),
    "no block": (lambda: inter_block(**_phase_1(count=0)), r"count 0 is outside 1..5, the slots"),
    "too many blocks": (lambda: inter_block(**_phase_1(count=6)), "count 6 is outside 1..5"),
    "strided bank": (
        lambda: inter_block(**_phase_1(bank=_zeros(4, 5, 192)[..., ::2])),
        "bank must have unit stride",
    ),
    "strided queries": (
        lambda: inter_block(**_phase_1(queries=_floats(2, 192)[:, ::2])),
        "queries must have unit stride",
    ),
    "queries elsewhere": (
        lambda: inter_block(**_phase_1(queries=torch.empty(2, 96, device="meta"))),
        f"queries is on meta but bank on {DEVICE}",
    ),
    "answers of another dtype": (
        lambda: inter_block(**_phase_1(out=(_floats(2, 4, 96), _floats(2, 4)))),
        r"answers is \[2, 4, 96\] torch.float32, not \[2, 4, 96\] torch.bfloat16",
    ),
    "sums of another shape": (
        lambda: inter_block(**_phase_1(out=(_zeros(2, 4, 96), _floats(4, 2)))),
        r"log_sums is \[4, 2\] torch.float32, not \[2, 4\] torch.float32",
    ),
    "expanded answers": (
        lambda: inter_block(**_phase_1(out=(_zeros(1, 4, 96).expand(2, 4, 96), _floats(2, 4)))),
        "answers is written and its rows overlap",
    ),
    "merge: answers of another dtype": (
        lambda: merge(**_phase_2(answers=_half(2, 4, 96))),
        r"answers is \[2, 4, 96\] torch.float16, not \[2, 4, 96\] torch.bfloat16",
    ),
    "merge: answers of other tokens": (
        lambda: merge(**_phase_2(answers=_zeros(2, 3, 96))),
        r"answers is \[2, 3, 96\]",
    ),
    "merge: one answer": (
        lambda: merge(**_phase_2(answers=_zeros(4, 96))),
        r"answers must be \[sites, tokens, hidden\], not \[4, 96\]",
    ),
    "merge: sums in a half": (
        lambda: merge(**_phase_2(log_sums=_zeros(2, 4))),
        r"log_sums is \[2, 4\] torch.bfloat16, not \[2, 4\] torch.float32",
    ),
    "merge: sums elsewhere": (
        lambda: merge(**_phase_2(log_sums=torch.empty(2, 4, device="meta"))),
        "log_sums is on meta",
    ),
    "merge: no such site": (
        lambda: merge(**_phase_2(position=2)),
        "position 2 is outside the 2 sites of phase 1",
    ),
    "merge: no such row": (lambda: merge(**_phase_2(row=5)), "row 5 is outside the 5 slots"),
    "merge: strided answers": (
        lambda: merge(**_phase_2(answers=_zeros(2, 4, 192)[..., ::2])),
        "answers must have unit stride",
    ),
    "merge: expanded bank": (
        lambda: merge(**_phase_2(bank=_zeros(1, 5, 96).expand(4, 5, 96))),
        "bank is written and its rows overlap",
    ),
    "merge: bias in a half": (lambda: merge(**_phase_2(bias=_zeros(1))), r"bias is \[1\] torch.b"),
    "norm: negative position": (
        lambda: norm_answer(**_norming(position=-1)),
        "position -1 is outside",
    ),
    "norm: weight of another size": (
        lambda: norm_answer(**_norming(norm_weight=_zeros(95))),
        r"norm_weight is \[95\], not \[96\]",
    ),
    "norm: out of another dtype": (
        lambda: norm_answer(**_norming(out=_half(4, 96))),
        r"out is \[4, 96\] torch.float16 but an answer is \[4, 96\] torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    call, sentence = REFUSALS[name]
    for kernel in ("inter_block_kernel", "merge_kernel", "norm_answer_kernel"):
        monkeypatch.setattr(triton_two_phase, kernel, None)
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_refuses_results_that_share_memory() -> None:
    """Writing a result must not change what another program still reads."""
    bank = _zeros(4, 5, 96)
    with pytest.raises(ValueError, match="answers must not share memory with bank"):
        inter_block(**_phase_1(bank=bank, out=(bank[:, 3:].transpose(0, 1), _floats(2, 4))))
    for name in ("delta", "answers"):
        arguments = _phase_2()
        shared = arguments[name] if name == "delta" else arguments[name][0]
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            merge(**arguments, out=shared)
    arguments = _norming()
    with pytest.raises(ValueError, match="out must not share memory with answers"):
        norm_answer(**arguments, out=arguments["answers"][0])


@pytest.mark.skipif(ON_GPU, reason="needs tensors without a Triton backend")
def test_refuses_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function names both ways out."""
    monkeypatch.setattr(triton_common, "INTERPRETED", False)
    for call in (
        lambda: inter_block(**_phase_1()),
        lambda: merge(**_phase_2()),
        lambda: norm_answer(**_norming()),
    ):
        with pytest.raises(ValueError, match="torch path, or set TRITON_INTERPRET=1 before"):
            call()


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_two_phase_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
