"""Every backend, through the functions that sites call, against the reference in float64."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import in_place
import pytest
import ragged
import torch
from compiling import reset_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, KEY_EPS, MASKS, NORM_EPS, Case, check_normed, every_row, identify
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnres_serve.kernels import backends, reference
from attnres_serve.kernels.cpp import backend as cpp_backend
from attnres_serve.kernels.cpp import library
from attnres_serve.kernels.interface import MASKED, BackendError, BankSlot, SiteWeights, slot_of
from attnres_serve.kernels.torch import functions as torch_functions

LOGIT_SCALE = 1.25


@pytest.fixture(params=["cpp", "torch"])  # triton's are in triton/test_backend.py
def backend(request: pytest.FixtureRequest) -> "Functions":
    return Functions(backends.load(request.param))


@pytest.fixture
def in_place_backend() -> "Functions":
    return Functions(backends.load("cpp"))


class Layout(NamedTuple):
    """How a bank and a sublayer's output lie in memory.

    Attributes:
        spare: rows of the bank behind those in use.
        around: rows of each token before the bank and behind it, which is a part of a bigger one.
        gap: elements between two rows.
        slots_first: all tokens' first rows lie together, then the second ones.
    """

    spare: int = 2
    around: int = 0
    gap: int = 0
    slots_first: bool = False


DENSE = Layout()
LAYOUTS = {
    "no row behind the one in use": Layout(spare=0),
    "the last row of a part": Layout(spare=0, around=3),
    "gaps": Layout(gap=7),
    "gaps, as wide as a vector": Layout(spare=1, around=1, gap=32),
    "slots first": Layout(gap=3, slots_first=True),
}


class Functions:
    """A backend's functions as those of the torch backend, whatever it works on.

    For one that works in place a bank is made, with NaN in the rows that are not in use and around
    it.  Nothing is written but the row in use, the sublayer's output and what a function is for.
    """

    def __init__(self, module: ModuleType, layout: Layout = DENSE) -> None:
        self.module, self.layout = module, layout

    def single_pass(self, blocks, partial, delta, weights: SiteWeights) -> tuple[Tensor, Tensor]:
        if not self.module.IN_PLACE:
            return self.module.single_pass(blocks, partial, delta, weights)
        return self._in_place("single_pass", (), blocks, partial, delta, weights)

    def phase_1(self, blocks, sites: list[SiteWeights]) -> tuple[int, object, Tensor]:
        """Blocks read, answers of the sites, and the normed answer of the first of them."""
        if not self.module.IN_PLACE:
            answers = self.module.phase_1(blocks, sites)
            normed = self.module.norm_answer(answers, sites[0], blocks[0])
            return len(blocks), answers, normed
        *earlier, last = blocks
        first = without_rest(sites[0], len(blocks))
        normed, answers = self.group(earlier, None, last, [first, *sites], True)[:2]
        return len(blocks), answers, normed

    def group(
        self, blocks, partial, delta, sites: list[SiteWeights], completes: bool
    ) -> tuple[Tensor, object, Tensor]:
        """In place only: the first site's normed mix, answers of the others, the partial sum."""
        bank, slot = make_bank(blocks, partial, delta, self.layout)
        x, queries = make_delta(delta, self.layout), self.module.queries_of(sites)
        group = queries, len(sites), sites[0], slot, completes
        with unchanged(sites):
            normed, answers = self.module.phase_1(x, bank, *group)
        return normed, answers, check_state(x, bank, blocks, partial, delta)

    def phase_2(
        self, known, number: int, since, partial, delta, weights: SiteWeights
    ) -> tuple[Tensor, Tensor]:
        read, answers, _ = known
        if not self.module.IN_PLACE:
            return self.module.phase_2(answers, number, since, partial, delta, weights)
        unread = [torch.full_like(delta, torch.nan)] * read
        rows = [*unread, *since]
        known = {"first": read, "number": number}
        return self._in_place("phase_2", (answers,), rows, partial, delta, weights, **known)

    def rounded(self, read: int) -> int:
        """Blocks for which an answer in the activation dtype stands; torch keeps it in float32."""
        return read if self.module.IN_PLACE else 0

    def add_to_row(self, blocks, partial, delta) -> Tensor:
        """In place only: the partial sum."""
        bank, slot = make_bank(blocks, partial, delta, self.layout)
        x = make_delta(delta, self.layout)
        with unchanged(x):
            self.module.add_to_row(x, bank, slot.row)
        return check_state(x, bank, blocks, partial, delta)

    def _in_place(
        self, name: str, known: tuple, blocks, partial, delta, weights: SiteWeights, **numbers: int
    ) -> tuple[Tensor, Tensor]:
        bank, slot = make_bank(blocks, partial, delta, self.layout)
        x = make_delta(delta, self.layout)
        slot = slot_of(slot.row, slot.fresh, **numbers)
        own = self.module.queries_of([weights]), weights, slot
        with unchanged(known, weights):
            normed = getattr(self.module, name)(x, bank, *known, *own)
        return normed, check_state(x, bank, blocks, partial, delta)


INTEGERS = {2: torch.int16, 4: torch.int32}  # by the size of an element
NAN = -1  # as one of these: a NaN of every dtype, and not the one that arithmetic makes


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def all_nan(*shape: int, like: Tensor) -> Tensor:
    integers = INTEGERS[like.dtype.itemsize]
    return torch.full(shape, NAN, dtype=integers, device=like.device).view(like.dtype)


def make_bank(
    blocks, partial: Tensor | None, like: Tensor, layout: Layout = DENSE
) -> tuple[Tensor, BankSlot]:
    tokens, hidden = like.shape
    slots = len(blocks) + 1 + layout.spare
    outer = [tokens, layout.around + slots + layout.around]
    if layout.slots_first:
        bigger = all_nan(*outer[::-1], hidden + layout.gap, like=like).transpose(0, 1)
    else:
        bigger = all_nan(*outer, hidden + layout.gap, like=like)
    bank = bigger.narrow(1, layout.around, slots).narrow(2, 0, hidden)
    for row, one in enumerate(blocks if partial is None else [*blocks, partial]):
        bank[:, row] = one
    return bank, slot_of(len(blocks), partial is None)


def make_delta(delta: Tensor, layout: Layout) -> Tensor:
    tokens, hidden = delta.shape
    return all_nan(tokens, hidden + layout.gap, like=delta)[:, :hidden].copy_(delta)


def check_state(x: Tensor, bank: Tensor, blocks, partial: Tensor | None, delta: Tensor) -> Tensor:
    """The new partial sum; the blocks and what lies around bank and ``x`` are as they were."""
    updated = delta if partial is None else bank[:, len(blocks)].clone()
    check_bank(bank, [*blocks, updated])
    check_around(x)
    return updated


def check_bank(bank: Tensor, rows: list[Tensor]) -> None:
    wanted, used = torch.stack(rows, dim=1), bank[:, : len(rows)]
    assert torch.equal(used.isnan(), wanted.isnan())
    assert torch.equal(used.nan_to_num(), wanted.nan_to_num())
    check_around(used)


def check_around(view: Tensor) -> None:
    """Memory that this is a part of holds, everywhere else, what ``all_nan`` put there."""
    size = view.untyped_storage().nbytes() // view.element_size()
    memory = bits(view.as_strided((size,), (1,), 0).clone())
    memory.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(NAN)
    assert (memory == NAN).all()


@contextmanager
def unchanged(*arguments: object) -> Iterator[None]:
    """Tensors among these and in tuples of theirs hold what they held, bit for bit."""
    tensors = [bits(one) for one in tree_leaves(arguments) if isinstance(one, Tensor)]
    before = [one.clone() for one in tensors]
    yield
    assert all(map(torch.equal, tensors, before))


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that an operator allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def site(case: Case, dtype: torch.dtype, number: int = 0, more: int = 0) -> SiteWeights:
    """Of the sources of a case and so many more."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    key_norms = 0.5 + torch.rand((number + 1, case.hidden), generator=generator)
    query, key_norm = case.queries(number + 1)[number], key_norms[number].to(case.device)
    bias = case.biases(number + 1, case.count + more)[number]
    learned = query, key_norm, bias, case.norm_weight(dtype)
    return SiteWeights(*learned, LOGIT_SCALE, KEY_EPS, NORM_EPS)


def without_rest(weights: SiteWeights, count: int) -> SiteWeights:
    """The same site with its first sources alone."""
    return weights._replace(bias=None if weights.bias is None else weights.bias[:count])


def folded(weights: SiteWeights) -> Tensor:
    return weights.query * weights.key_norm * weights.logit_scale


def check(normed: Tensor, sources: list[Tensor], weights: SiteWeights, answered: int = 0) -> None:
    """A site's result on these sources, of which the last is its own partial sum."""
    own = folded(weights), weights.norm_weight
    check_normed(normed, sources, *own, answered, weights.bias)


def split(last: Tensor) -> tuple[Tensor, Tensor]:
    """A partial sum and a sublayer's output for it, not exact in their sum."""
    partial = (0.7 * last.float()).to(last.dtype)
    return partial, (last.float() - 0.6 * partial.float()).to(last.dtype)


@every_row
def test_single_pass(
    case: Case, dtype: torch.dtype, backend: Functions, unwritten: Callable[..., None]
) -> None:
    """With a partial sum and without; the new partial sum is exact."""
    *blocks, last = case.sources(dtype)
    weights, (partial, delta) = site(case, dtype), split(last)
    unwritten(*blocks, last, partial, delta, *weights[:2])
    normed, updated = backend.single_pass(blocks, None, last, weights)
    assert updated is last
    check(normed, [*blocks, last], weights)
    normed, updated = backend.single_pass(blocks, partial, delta, weights)
    assert torch.equal(updated, partial + delta)
    check(normed, [*blocks, updated], weights)


@every_row
@pytest.mark.parametrize("sites", [1, 6])
def test_two_phase(
    case: Case,
    dtype: torch.dtype,
    sites: int,
    backend: Functions,
    unwritten: Callable[..., None],
) -> None:
    """The first site reads blocks only, the others merge a partial sum, new or grown."""
    blocks = case.sources(dtype)
    (last,) = Case(tokens=case.tokens, count=1, hidden=case.hidden, seed=5).sources(dtype)
    last = case.scale * last
    partial, delta = split(last)
    all_weights = [site(case, dtype, number, more=1) for number in range(sites)]
    unwritten(*blocks, last, partial, delta)
    answers = backend.phase_1(blocks, all_weights)
    for position, weights in enumerate(all_weights):
        own = without_rest(weights, len(blocks))
        if own.bias is None or (own.bias > MASKED).any():
            check(backend.phase_1(blocks, [own])[2], blocks, own)
        normed, updated = backend.phase_2(answers, position, (), None, last, weights)
        assert updated is last
        answered = backend.rounded(len(blocks))
        check(normed, [*blocks, last], weights, answered)
        normed, updated = backend.phase_2(answers, position, (), partial, delta, weights)
        assert torch.equal(updated, partial + delta)
        check(normed, [*blocks, updated], weights, answered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [Case(count=4), Case(count=20)], ids=identify)
def test_blocks_that_were_finished_after_phase_1(
    case: Case, dtype: torch.dtype, backend: Functions
) -> None:
    """A merge reads them besides the answer, however many they are."""
    *blocks, last = case.sources(dtype)
    weights, (partial, delta) = site(case, dtype), split(last)
    for read in range(1, len(blocks)):
        answers = backend.phase_1(blocks[:read], [weights])
        own = blocks[read:], partial, delta, weights
        normed, updated = backend.phase_2(answers, 0, *own)
        assert torch.equal(updated, partial + delta)
        check(normed, [*blocks, updated], weights, backend.rounded(read))


@every_row
@pytest.mark.parametrize("sites", [1, 6])
def test_the_first_site_of_a_group_in_place(
    case: Case, dtype: torch.dtype, sites: int, in_place_backend: Functions
) -> None:
    """On a sum that begins or grows, and that later sites read or do not."""
    *blocks, last = case.sources(dtype)
    for partial, delta in ((None, last), split(last)):
        for completes in (True, False) if blocks else (True,):
            all_weights = [site(case, dtype)]
            all_weights += [site(case, dtype, at, more=completes) for at in range(1, sites)]
            group = blocks, partial, delta, all_weights, completes
            normed, answers, updated = in_place_backend.group(*group)
            assert torch.equal(updated, delta if partial is None else partial + delta)
            weights = all_weights[0]
            check(normed, [*blocks, updated], weights)
            read = [*blocks, updated] if completes else blocks
            known = len(read), answers, None
            for number, weights in enumerate(all_weights[1:]):
                normed, _ = in_place_backend.phase_2(known, number, (), None, last, weights)
                check(normed, [*read, last], weights, len(read))


@every_row
def test_a_row_that_nothing_attends_to(
    case: Case, dtype: torch.dtype, in_place_backend: Functions
) -> None:
    """It grows by the sublayer's output, which stays."""
    *blocks, last = case.sources(dtype)
    partial, delta = split(last)
    assert torch.equal(in_place_backend.add_to_row(blocks, partial, delta), partial + delta)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, torch.dtype]:
    """Any small shape, at any magnitude that the dtype has room for.

    Queries of size 0 give equal scores, those of size 12 one that dominates.
    """
    dtype = draw(st.sampled_from(DTYPES))
    scales = [1e-6, 1e-3, 1.0, 30.0, 3e3] + [1e-20, 1e15] * (dtype != torch.float16)
    case = Case(
        tokens=draw(st.integers(0, 40)),
        count=draw(st.integers(1, 16)),
        hidden=draw(st.integers(1, 300)),
        scale=draw(st.sampled_from(scales)),
        query_scale=draw(st.sampled_from([0.0, 0.01, 0.3, 12.0])),
        bias=draw(st.sampled_from([None, 0.7, 30.0, *MASKS])),
        norm_dtype=draw(st.sampled_from([None, *DTYPES])),
        seed=draw(st.integers(0, 2**31)),
    )
    return case, dtype


layouts = st.builds(
    Layout,
    spare=st.integers(0, 2),
    around=st.integers(0, 2),
    gap=st.sampled_from([0, 1, 7, 32]),
    slots_first=st.booleans(),
)


def check_all(case: Case, dtype: torch.dtype, sites: int, backend: Functions) -> None:
    """What the tests above say of their rows."""

    def unwritten(*tensors: Tensor) -> None:
        pass

    test_single_pass(case, dtype, backend, unwritten)
    test_two_phase(case, dtype, sites, backend, unwritten)
    test_blocks_that_were_finished_after_phase_1(case, dtype, backend)
    if backend.module.IN_PLACE:
        test_the_first_site_of_a_group_in_place(case, dtype, sites, backend)
        test_a_row_that_nothing_attends_to(case, dtype, backend)


@settings(max_examples=50, deadline=None)
@given(drawn=cases(), sites=st.integers(1, 6))
def test_any_shape_and_magnitude_by_torch(drawn: tuple[Case, torch.dtype], sites: int) -> None:
    check_all(*drawn, sites, Functions(backends.load("torch")))


@settings(max_examples=50, deadline=None)
@given(drawn=cases(), sites=st.integers(1, 6), layout=layouts)
def test_any_shape_magnitude_and_layout_in_place(
    drawn: tuple[Case, torch.dtype], sites: int, layout: Layout
) -> None:
    check_all(*drawn, sites, Functions(backends.load("cpp"), layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_place(layout: str, dtype: torch.dtype) -> None:
    """With tokens for several threads, and rows that no vector fills."""
    case = Case(count=4, tokens=33, hidden=257)
    check_all(case, dtype, 6, Functions(backends.load("cpp"), LAYOUTS[layout]))


@pytest.mark.parametrize("copies", [2, 5])
def test_a_recency_bias_of_log_n_is_n_copies_of_the_last_source(
    backend: Functions, copies: int
) -> None:
    """In all algorithms, with a new partial sum and with one that grew."""
    case = Case(count=4)
    *blocks, last = case.sources(torch.float32)
    partial, delta = split(last)
    weights = site(case, torch.float32)._replace(bias=torch.tensor([1.0, 1, 1, copies]).log())
    answers = backend.phase_1(blocks, [weights])
    for normed, updated in (
        backend.single_pass(blocks, None, last, weights),
        backend.single_pass(blocks, partial, delta, weights),
        backend.phase_2(answers, 0, (), None, last, weights),
        backend.phase_2(answers, 0, (), partial, delta, weights),
    ):
        sources = [*blocks, *[updated] * copies]
        check_normed(normed, sources, folded(weights), weights.norm_weight)


@pytest.mark.parametrize("copies", [2, 5])
def test_a_recency_bias_of_the_reference(copies: int) -> None:
    *blocks, last = sources = Case(count=5).sources(torch.float32)
    (query,), bias = Case().queries(), torch.tensor([1.0, 1, 1, 1, copies]).log()  # off by 2^-24
    exact, _ = reference.mix([*blocks, *[last] * copies], query, KEY_EPS, torch.float64)
    biased, _ = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    torch.testing.assert_close(biased, exact, rtol=1e-7, atol=1e-7)
    (answer,), (log_sum,) = reference.phase_1(blocks, query[None], KEY_EPS, torch.float64)
    merged = reference.phase_2(answer, log_sum, last, query, KEY_EPS, bias[-1:])
    torch.testing.assert_close(merged, exact, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mask", MASKS)
def test_what_a_mask_leaves_out_of_the_reference(mask: str) -> None:
    """The mix is that of the other sources alone, by both algorithms and in both dtypes."""
    case = Case(count=5, bias=mask)
    sources, (query,), (bias,) = case.sources(torch.float32), case.queries(), case.biases(1, 5)
    assert bias is not None
    kept = (bias > MASKED).nonzero()[:, 0].tolist()
    assert 0 < len(kept) < 5
    for dtype in (torch.float32, torch.float64):
        few = [sources[at] for at in kept]
        exact, _ = reference.mix(few, query, KEY_EPS, dtype, bias[kept])
        mixed, weights = reference.mix(sources, query, KEY_EPS, dtype, bias)
        assert (weights[:, bias <= MASKED] == 0).all()
        of_blocks = query[None], KEY_EPS, dtype, bias[None, :4]
        (answer,), (log_sum,) = reference.phase_1(sources[:4], *of_blocks)
        merged = reference.phase_2(answer, log_sum, sources[4], query, KEY_EPS, bias[4:])
        for found in (mixed, merged):
            torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    "case",
    [
        Case(count=6, tokens=1003),
        # Rows of two tokens fit the first cache, and those of one hardly: by four, two and one.
        Case(count=9, tokens=11, hidden=700),
        Case(count=20, tokens=11, hidden=1100),
    ],
    ids=identify,
)
def test_the_cpp_backend_is_batch_invariant(case: Case) -> None:
    """Bit for bit the same numbers, whatever else is in the batch, in all algorithms."""
    backend = Functions(backends.load("cpp"))
    *blocks, last = case.sources(torch.bfloat16)
    weights, (partial, delta) = site(case, torch.bfloat16), split(last)

    def run(chosen: slice) -> list[Tensor]:
        some = [block[chosen] for block in blocks]
        known = backend.phase_1(some, [weights] * 5)
        own = partial[chosen], delta[chosen], weights
        return [
            backend.single_pass(some, *own)[0],
            backend.phase_2(known, 4, (), *own)[0],
            known[-1],
        ]

    together = run(slice(None))
    check(together[0], [*blocks, partial + delta], weights)
    for token in (0, case.tokens // 2, case.tokens - 1):
        for whole, alone in zip(together, run(slice(token, token + 1)), strict=True):
            assert torch.equal(whole[token], alone[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(backend: Functions, value: float) -> None:
    """A source that overflowed poisons its token, and that token alone."""
    for dtype in DTYPES:
        case = Case(count=4, tokens=3)
        *blocks, last = case.sources(dtype)
        last[1, 5] = value
        weights = site(case, dtype)
        for normed, _ in (
            backend.single_pass(blocks, None, last, weights),
            backend.phase_2(backend.phase_1(blocks, [weights]), 0, (), None, last, weights),
        ):
            assert normed[1].isnan().any()
            assert normed[[0, 2]].isfinite().all()


def refuse(*arguments: object) -> None:
    raise AssertionError("this form must not be used here")


UNROLLED = 4, 0.7, "_stacked"
STACKED = torch_functions.MAX_UNROLLED + 2, None, "_unrolled"


# The form is chosen while a graph is traced, which needs no code for it.
@pytest.mark.parametrize(
    ("count", "bias", "other", "compiler"),
    [
        pytest.param(*UNROLLED, "eager", id="unrolled"),
        pytest.param(*STACKED, "eager", id="stacked"),
        pytest.param(*UNROLLED, "inductor", id="all unrolled", marks=pytest.mark.exhaustive),
        pytest.param(*STACKED, "inductor", id="all stacked", marks=pytest.mark.exhaustive),
    ],
)
def test_the_torch_backend_compiled(
    count: int, bias: float | None, other: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All algorithms in one graph for any number of tokens, in the form meant for this depth."""
    backend = backends.load("torch")
    monkeypatch.setattr(torch_functions, other, refuse)

    def run(
        blocks: list[Tensor], partial: Tensor, delta: Tensor, weights: SiteWeights
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        answers = backend.phase_1(blocks, [weights, weights])
        return (
            backend.single_pass(blocks, partial, delta, weights),
            backend.phase_2(answers, 1, (), partial, delta, weights),
            backend.phase_2(answers, 0, (), None, delta, weights),
        )

    reset_compiler()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=compiler)
    for tokens, scale in ((5, 1.0), (33, 1e4)):
        case = Case(tokens=tokens, count=count, scale=scale, bias=bias)
        *blocks, last = case.sources(torch.bfloat16)
        weights, (partial, delta) = site(case, torch.bfloat16), split(last)
        with torch._dynamo.config.patch(error_on_recompile=tokens > 5):
            *grown, fresh = compiled(blocks, partial, delta, weights)
        for normed, updated in grown:
            assert torch.equal(updated, partial + delta)
            check(normed, [*blocks, updated], weights)
        check(fresh[0], [*blocks, delta], weights)


@pytest.mark.parametrize(
    "second_version", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)  # False is vLLM's choice
def test_a_compiled_graph_writes_the_bank_of_the_cpp_backend_in_place(second_version: bool) -> None:
    in_place.check_compiled(backends.load("cpp"), "cpu", second_version)


def arguments_of_operators(dtype: torch.dtype) -> dict[str, tuple]:
    """Of every operator of the cpp backend, by its name."""
    backends.load("cpp")
    delta, bank, sites = in_place.inputs(6, "cpu")
    delta, bank = delta.to(dtype), bank.to(dtype)
    keys = [one.query for one in sites], [one.key_norm for one in sites]
    biases = [one.bias for one in sites]
    own = cpp_backend.arguments(sites[0], slot_of(2, fresh=False))
    opening = cpp_backend.numbers(sites[0], slot_of(1, fresh=True))
    later = in_place.SITES - 1
    answers = torch.randn(later, *delta.shape).to(dtype), torch.randn(later, len(delta))
    group = delta, bank, *answers, *opening, True, *keys, biases, sites[0].norm_weight
    return {
        "single_pass": (delta, bank, *own),
        "phase_1": group,
        "phase_2": (delta, bank, *answers, 1, 1, *own),
        "add_to_row": (delta, bank, 2),
        "recurrence": arguments_of_the_recurrence(dtype),
        "situ_experts": (
            *(torch.randn(shape).to(dtype) for shape in ((3, 64), (2, 16, 64), (2, 64, 8))),
            *(torch.rand(3, 2), torch.tensor([[0, 1]] * 3), 4.0, 25.0, torch.zeros(3, 64)),
        ),
    }


def arguments_of_the_recurrence(dtype: torch.dtype) -> tuple:
    batch = vars(ragged.random().to(dtype, torch.float32))
    return *batch.values(), torch.zeros_like(batch["v"])


def test_operators_keep_the_rules_of_torch() -> None:
    """Schemas (what is written to, too), fakes and dispatch, as torch's own check sees them."""
    cases = arguments_of_operators(torch.bfloat16)
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "::cpp_" in name}
    assert registered == {f"attnres_serve::cpp_{name}" for name in cases}
    for name, arguments in cases.items():
        operator = getattr(torch.ops.attnres_serve, f"cpp_{name}").default
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, bank, site: {"x": x[:, :-1]}, "must be"),
        (lambda x, bank, site: {"x": x[:-1]}, "must be"),
        (lambda x, bank, site: {"x": x.float()}, "one dtype"),
        (lambda x, bank, site: {"x": x.t().contiguous().t()}, "contiguous"),
        (lambda x, bank, site: {"slot": slot_of(-1, True)}, "outside of the bank"),
        (lambda x, bank, site: {"slot": slot_of(6, True)}, "outside of the bank"),
        (lambda x, bank, site: {"x": x[:1].expand(65, 64)}, "rows of x must not"),
        (lambda x, bank, site: {"x": bank[:, 4]}, "must not share memory"),
        (lambda x, bank, site: {"site": site._replace(query=site.query[:16])}, "must be"),
        (lambda x, bank, site: {"site": site._replace(bias=torch.ones(2))}, "must be"),
        (lambda x, bank, site: {"site": site._replace(norm_weight=x[0, :3])}, "must be"),
    ],
)
def test_operators_refuse_what_they_would_misread(change, message: str) -> None:
    """Nothing is read or written beyond an argument."""
    backend = backends.load("cpp")
    case = Case(count=3, tokens=65, hidden=64)
    *blocks, last = case.sources(torch.bfloat16)
    bank, slot = make_bank(blocks, None, last)
    given = {"x": last, "site": site(case, torch.bfloat16), "slot": slot}
    given |= change(last, bank, given["site"])
    weights = given["site"]
    with pytest.raises(RuntimeError, match=message):
        backend.single_pass(given["x"], bank, [weights], weights, given["slot"])


@pytest.mark.parametrize(
    ("by_token", "by_slot", "fits"),
    [
        (16, 8, True),
        (15, 8, False),
        (16, 7, False),
        (8, 24, True),
        (8, 23, False),
        (7, 24, False),
        (0, 8, False),
        (16, 0, False),
    ],
)
def test_rows_of_a_bank_that_overlap(by_token: int, by_slot: int, fits: bool) -> None:
    """Threads would write over each other's rows."""
    bank = torch.zeros(48).as_strided((3, 2, 8), (by_token, by_slot, 1))
    refused = pytest.raises(RuntimeError, match="rows of the bank must not overlap in memory")
    with nullcontext() if fits else refused:
        backends.load("cpp").add_to_row(torch.ones(3, 8), bank, 1)
        assert torch.equal(bank.sum((0, 2)), torch.tensor([0.0, 24.0]))


@pytest.mark.parametrize(
    ("x_at", "bank_at", "fits"), [(0, 24, True), (0, 23, False), (48, 0, True), (47, 0, False)]
)
def test_x_and_bank_side_by_side(x_at: int, bank_at: int, fits: bool) -> None:
    """They may lie in one piece of memory, but not have an element in common."""
    memory = torch.ones(72)
    x, bank = memory[x_at:][:24].view(3, 8), memory[bank_at:][:48].view(3, 2, 8)
    refused = pytest.raises(RuntimeError, match="x must not share memory with the bank")
    with nullcontext() if fits else refused:
        backends.load("cpp").add_to_row(x, bank, 1)
        assert torch.equal(bank, torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(3, 2, 8))
        assert torch.equal(x, torch.ones(3, 8))


def test_every_operator_that_writes_to_the_bank_refuses_one_that_overlaps() -> None:
    cases = arguments_of_operators(torch.float32)
    del cases["recurrence"], cases["situ_experts"]  # which have no bank
    for name, (delta, bank, *rest) in cases.items():
        with pytest.raises(RuntimeError, match="rows of the bank must not overlap in memory"):
            getattr(torch.ops.attnres_serve, f"cpp_{name}")(delta, bank[:1].expand_as(bank), *rest)


def test_operators_refuse_what_was_made_for_other_sites() -> None:
    """A site that is not among those answered, and answers of another batch."""
    backend = backends.load("cpp")
    case = Case(count=3, hidden=64)
    *blocks, last = case.sources(torch.bfloat16)
    bank, slot = make_bank(blocks, None, last)
    weights, operators = site(case, torch.bfloat16), torch.ops.attnres_serve
    queries = [weights] * 2
    own = cpp_backend.arguments(weights, slot)
    _, answers = backend.phase_1(last, bank, queries, 2, weights, slot, True)
    for number in (-1, 1):
        with pytest.raises(RuntimeError, match="not among those of the answers"):
            operators.cpp_phase_2(last, bank, *answers, number, 0, *own)
    with pytest.raises(RuntimeError, match="of the bank's size"):
        operators.cpp_phase_2(last[:-1], bank[:-1], *answers, 0, 0, *own)


LOAD = """
from attnres_serve.kernels import backends, interface
try:
    backends.load("cpp")
    backends.load("cpp")
    import torch
    print(torch.ops.attnres_serve.cpp_single_pass.default)
except interface.BackendError as error:
    print(error)
"""


def load_in_processes(count: int, **env: str) -> list[str]:
    """What processes that load the backend at the same time print."""
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [subprocess.Popen(command, env=os.environ | env, **options) for _ in range(count)]
    return [child.communicate(timeout=240)[0].strip() for child in children]


@pytest.mark.exhaustive
def test_a_cold_cache_and_a_damaged_library(tmp_path: Path) -> None:
    """Workers that start together compile once; a library that cannot be loaded is made anew.

    The cache needs to be written for that only.
    """
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert load_in_processes(2, **cache) == ["attnres_serve.cpp_single_pass.default"] * 2
    made = {one: one.stat().st_ino for one in (tmp_path / "attnres_serve").glob("*.so")}
    names = {"cpp_operators", *(f"cpp_{name}" for name in library.KERNELS)}
    assert {one.name.partition("-")[0] for one in made} == names
    for lock in (one.with_suffix(".lock") for one in made):
        lock.unlink()
        lock.mkdir()  # as in a folder that can only be read, for any user: it cannot be opened
    assert load_in_processes(1, **cache) == ["attnres_serve.cpp_single_pass.default"]
    assert {one: one.stat().st_ino for one in made} == made
    for name in ("operators", "float32"):
        (one,) = (tmp_path / "attnres_serve").glob(f"cpp_{name}-*.so")
        one.write_bytes(b"no library")
        (said,) = load_in_processes(1, **cache)
        lock = one.with_suffix(".lock")
        assert "no place for its library" in said and lock.name in said
        lock.rmdir()
        assert load_in_processes(1, **cache) == ["attnres_serve.cpp_single_pass.default"]
        assert one.stat().st_size > 1000


UNABLE = """#!/bin/sh
case "$*" in *-march=native*) echo "cc1plus: error: bad value 'native'" >&2; exit 1;; esac
exec c++ "$@"
"""


def test_what_keeps_the_backend_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that says what to do; nothing is left half-made."""
    monkeypatch.setattr(cpp_backend, "_ready", False)

    def refused(**env: str) -> str:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(BackendError) as error:
            backends.load("cpp")
        assert "\n" not in str(error.value)
        return str(error.value)

    said = refused(XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler -pipe")
    assert "there is no 'no-such-compiler" in said and "install a C++ compiler" in said
    compiler = tmp_path / "compiler"  # one that does not know this processor
    compiler.write_text(UNABLE)
    compiler.chmod(0o755)
    said = refused(CXX=str(compiler))
    assert f"by '{compiler}' (cc1plus: error: bad value 'native'); mend that or set CXX" in said
    assert "install" not in said
    assert "could not be compiled by 'true' (exit status 0)" in refused(CXX="true")  # no library
    assert 'there is no "g++ \'" on the path' in refused(CXX="g++ '")
    assert not list((tmp_path / "attnres_serve").glob("*.so"))
    file = tmp_path / "file"
    file.touch()
    said = refused(XDG_CACHE_HOME=str(file))
    assert "no place for its library" in said and "XDG_CACHE_HOME" in said


COMPILED_FOR = """
import sys, pytest
from attnres_serve.kernels.cpp import library
file, machine = sys.argv[1:]
flags = [f"-march={machine}" if "-march" in flag else flag for flag in library.FLAGS]
library.FLAGS = tuple(flags)
chosen = "test_layouts_in_place or magnitude_and_layout or (not_finite and cpp)"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", file, "-k", chosen]))
"""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="a processor that does not run what is compiled for x86-64-v3",
)
@pytest.mark.parametrize(
    ("compiler", "machine"),
    [
        pytest.param("g++", "x86-64-v3", marks=pytest.mark.exhaustive),
        pytest.param("g++", "x86-64-v2", marks=pytest.mark.exhaustive),
        pytest.param("clang++", "x86-64-v3", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_for_other_machines(compiler: str, machine: str, tmp_path: Path) -> None:
    """With narrower vectors than this processor's, and by another compiler: the same bounds."""
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler} here")
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED_FOR, __file__, machine],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": compiler},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout and list(tmp_path.glob("attnres_serve/*.so"))
