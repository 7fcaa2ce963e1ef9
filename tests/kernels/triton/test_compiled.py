"""The Triton kernels executed as compiled code, without a GPU: ``tests/support/ptx``.

The emulator itself refuses an access that is out of bounds or misaligned, an access that two warps
or programs make in no order, and an instruction that it does not know.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product

import pytest
import torch
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, half_ulp, mix_error
from ptx.errors import OutOfBoundsError, RaceError
from ptx.launch import Emulator
from torch import Tensor
from triton_cases import close, gain
from triton_interpreter import bits  # it chooses the interpreter before Triton is imported

from attnres_serve.kernels import reference
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton import score_group
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least, by_product, phase_1, turns_of
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import single_pass
from benchmarks.kernels import traffic

pytestmark = pytest.mark.timeout(600)

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}
FAR = 2**31 + 64  # elements; of 32 bits 64 would be left


@dataclass(frozen=True)
class Case:
    """Sites over ``count`` finished blocks; the next row of the bank is the partial sum."""

    hidden: int = 1024
    dtype: torch.dtype = torch.bfloat16
    arch: int = 90
    tokens: int = 2
    count: int = 3
    sites: int = 3
    fresh: bool = False
    bias: float | None = None
    stride: int | None = None  # of slots, in elements; dense if None

    def __str__(self) -> str:
        default = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "plain"


class Site:
    """Random inputs of a case, and what a launch must leave of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.hidden)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        hidden, tokens, slots = case.hidden, case.tokens, case.count + 2
        self.bank = draw(tokens, slots, hidden).to(case.dtype)
        self.bank[:, case.count + case.fresh :] = torch.nan  # not begun
        if not case.fresh:
            self.bank[:, case.count] = draw(tokens, hidden).to(case.dtype)
        if case.stride:
            # Memory that is never touched costs nothing.
            shape, strides = self.bank.shape, (slots * case.stride, case.stride, 1)
            reach = (tokens * slots - 1) * case.stride + hidden
            far = torch.empty(reach, dtype=case.dtype).as_strided(shape, strides)
            self.bank = far.copy_(self.bank)
        self.delta = draw(tokens, hidden).to(case.dtype)
        self.queries = 2 * draw(case.sites, hidden) / hidden**0.5
        self.weight = (1 + 0.3 * draw(hidden)).to(case.dtype)
        self.bias = None if case.bias is None else torch.tensor([case.bias])
        self.blocks = [self.bank[:, i].clone() for i in range(case.count)]
        before = None if case.fresh else self.bank[:, case.count].clone()
        self.partial = reference.add_partial(before, self.delta)
        self.sources = [*self.blocks, self.partial]
        self.where = {"row": case.count, "fresh": case.fresh, "bias": self.bias}
        self.read = [t.clone() for t in (self.delta, self.queries, self.weight)]
        self.state = self.bank.clone()

    def adds(self) -> None:
        """The launch adds to the partial sum's row."""
        self.state[:, self.case.count] = self.partial

    def unchanged(self) -> None:
        """No bit of the bank or of what is only read is another than it should be."""
        assert torch.equal(bits(self.bank), bits(self.state)), "state or untouched rows"
        for now, before in zip((self.delta, self.queries, self.weight), self.read, strict=True):
            assert torch.equal(bits(now), bits(before)), "an argument was written to"

    def mixed(self, out: Tensor, mixed: Tensor, query: Tensor) -> None:
        """A result is the norm of the float64 mix, rounded once."""
        expected = reference.rms_norm(mixed, self.weight, NORM_EPS)
        error = (1 + abs(self.case.bias or 0)) * mix_error(self.sources, query)
        tolerance = half_ulp(expected, self.case.dtype) + gain(mixed, self.weight) * error
        close(out, expected, tolerance)

    def whole(self, out: Tensor, query: Tensor) -> None:
        """As ``mixed``, by the specification."""
        mixed, _ = reference.mix(self.sources, query, KEY_EPS, torch.float64, self.bias)
        self.mixed(out, mixed, query)

    def answered(self, answers: Tensor, log_sums: Tensor, rows: list[Tensor], at: int) -> None:
        """Answers over finished rows, of the sites from ``at`` on."""
        queries = self.queries[at:]
        exact = reference.phase_1(rows, queries, KEY_EPS, torch.float64)
        largest = torch.stack(rows).abs().amax((0, 2)).double()
        for site, query in enumerate(queries):
            error = mix_error(rows, query)
            close(answers[site], exact[0][site], half_ulp(exact[0][site], self.case.dtype) + error)
            close(log_sums[site], exact[1][site], error[:, 0] / largest)


def _single_pass(site: Site) -> int:
    query = site.queries[0]
    out = single_pass(site.delta, site.bank, query, site.weight, **site.where, **EPS)
    site.adds()
    site.whole(out, query)
    case = site.case
    return traffic.single_pass(case.tokens, case.count, case.hidden, case.dtype, fresh=case.fresh)


def _single_pass_of_many(site: Site) -> int:
    """As of many tokens: another config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_single_pass, "FEW", 0)
        return _single_pass(site)


def _phase_1(site: Site, completes: bool = True) -> int:
    case, arguments = site.case, (site.delta, site.bank, site.queries, site.weight)
    out, answers, log_sums = phase_1(*arguments, completes=completes, **site.where, **EPS)
    site.adds()
    site.whole(out, site.queries[0])
    site.answered(answers, log_sums, site.sources if completes else site.blocks, 1)
    shape = case.tokens, case.count, case.sites, case.hidden, case.dtype
    added = turns_of(case.tokens, case.sites, case.hidden) > 1
    before = traffic.add_to_row(case.tokens, case.hidden, case.dtype, fresh=case.fresh)
    return added * before + traffic.phase_1(*shape, fresh=case.fresh, added=added)


def _phase_1_in_turns(site: Site) -> int:
    """As of many tokens: one program takes all turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: 0})
        return _phase_1(site)


def _phase_1_by_product(site: Site, completes: bool = True) -> int:
    """As of many tokens in bfloat16."""
    case = site.case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_phase_1, "LEAST", {MAX_HIDDEN: Least(logits=1, sites=2)})
        stated = _phase_1(site, completes)
        chosen = by_product(case.tokens, case.count + 1, case.sites, case.hidden, case.dtype)
        assert chosen == (case.dtype == torch.bfloat16)
        if not chosen:
            return stated
    shape = case.tokens, case.count, case.sites
    vectors = case.hidden, case.dtype
    return (
        traffic.score_group(*shape, *vectors, fresh=case.fresh)
        + traffic.weigh_group(*shape, completes=completes)
        + traffic.mix_group(*shape, *vectors, completes=completes)
    )


def _phase_1_of_a_partial_sum(site: Site) -> int:
    return _phase_1(site, completes=False)


def _phase_2(site: Site, late: int = 0, cancels: bool = False) -> int:
    case, query, position = site.case, site.queries[-1], site.case.sites - 1
    blocks, rows = site.blocks[: case.count - late], site.blocks[case.count - late :]
    exact = reference.phase_1(blocks, site.queries, KEY_EPS, torch.float64)
    answers, log_sums = exact[0].to(case.dtype), exact[1].float()
    if cancels:  # the partial sum, which has the same weight
        answers[position] = -33 / 32 * site.partial
        own = reference.scores(site.partial.double(), query.double(), KEY_EPS)
        log_sums[position] = own + (case.bias or 0)
    out = phase_2(
        *(site.delta, site.bank, answers, log_sums, query, site.weight),
        **(site.where | EPS | {"position": position, "first": case.count - late}),
    )
    site.adds()
    # The answer as it was rounded: this launch is not to blame for that.
    mixed, log_sum = answers[position].double(), log_sums[position].double()
    for row in rows:
        mixed = reference.phase_2(mixed, log_sum, row, query, KEY_EPS)
        score = reference.scores(row.double(), query.double(), KEY_EPS)
        log_sum = torch.logaddexp(log_sum, score)
    mixed = reference.phase_2(mixed, log_sum, site.partial, query, KEY_EPS, site.bias)
    site.mixed(out, mixed, query)
    return traffic.phase_2(case.tokens, case.hidden, case.dtype, fresh=case.fresh, late=late)


def _phase_2_with_late_rows(site: Site) -> int:
    return _phase_2(site, late=2)


def _phase_2_that_cancels(site: Site) -> int:
    """It has a branch of its own, which sums the square of the mix."""
    return _phase_2(site, cancels=True)


LAUNCHES = {
    "single_pass": _single_pass,
    "single_pass, many": _single_pass_of_many,
    "phase_1": _phase_1,
    "phase_1, in turns": _phase_1_in_turns,
    "phase_1, partial": _phase_1_of_a_partial_sum,
    "phase_1, by a product": _phase_1_by_product,
    "phase_1, by a product, partial": lambda site: _phase_1_by_product(site, False),
    "phase_2": _phase_2,
    "phase_2, late rows": _phase_2_with_late_rows,
    "phase_2, cancels": _phase_2_that_cancels,
}
every_launch = pytest.mark.parametrize("launch", LAUNCHES)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """In the place of every kernel."""
    emulator = Emulator()
    emulator.install(monkeypatch)
    return emulator


def _compare(emulator: Emulator, launch: str, case: Case) -> None:
    """Hold values, state, other memory and bytes of a launch to what they should be."""
    emulator.arch = case.arch
    site = Site(case)
    stated = LAUNCHES[launch](site)
    site.unchanged()
    assert sum(map(sum, emulator.moved)) == stated + 4 * (case.bias is not None)


@every_launch
def test_a_launch(launch: str, emulator: Emulator) -> None:
    """Every kernel, with all its warps."""
    _compare(emulator, launch, Case(sites=5))


GRID = [
    *(
        Case(hidden, dtype, arch)
        for hidden, dtype, arch in product((8, 48, 257, 1024, 7168), DTYPES, (80, 90, 120))
    ),
    *(Case(arch=arch, fresh=True, bias=bias) for arch, bias in product((80, 90, 120), (None, 1.5))),
    *(Case(hidden, bias=-3.0, sites=9, tokens=1) for hidden in (48, 2304, 4096, 7168)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", GRID, ids=str)
@every_launch
def test_over_the_grid(launch: str, case: Case, emulator: Emulator) -> None:
    """Architectures, dtypes and hidden sizes that have each a config of their own."""
    _compare(emulator, launch, case)


@every_launch
def test_rows_beyond_32_bits(launch: str, emulator: Emulator) -> None:
    """Slots of a bank stand 2^31 elements apart: an offset cut to 32 bits leaves the bank."""
    _compare(emulator, launch, Case(hidden=64, tokens=1, stride=FAR))


def test_an_offset_of_32_bits_is_noticed(emulator: Emulator) -> None:
    """Products with strides lose their high halves."""
    product = re.compile(r"(mul\.lo\.s64\s+(%rd\d+),[^;]*;)")
    emulator.change = lambda ptx: product.sub(r"\1 and.b64 \2, \2, 4294967295;", ptx)
    with pytest.raises(OutOfBoundsError):
        _compare(emulator, "single_pass", Case(hidden=64, tokens=1, stride=FAR))


def test_weights_of_many_rows_and_sites(emulator: Emulator) -> None:
    """Several warps share them."""
    _compare(emulator, "phase_1, by a product", Case(hidden=64, count=70, sites=20))


@pytest.mark.parametrize(
    ("sites", "arch"),
    [
        (20, 90),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((20, 80), (40, 90))),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((20, 120), (16, 90))),
    ],
)
def test_rounds_of_a_product_of_many_sites(sites: int, arch: int, emulator: Emulator) -> None:
    """Each config copies the next rounds while it multiplies one; the last is not whole."""
    case = Case(hidden=472, count=2, sites=sites, arch=arch)
    assert case.hidden > 3 * score_group.config_for(sites, divmod(arch, 10)).chunk
    _compare(emulator, "phase_1, by a product", case)


BARRIER = re.compile(r"bar\.sync\s+0;")


# Spare as compiled today: a thread reads back what it has stored, in later turns of ``phase_1``
# and in ``score_group`` behind the row's sum.  ``weigh_group`` has one warp where rows are few.  In
# a merge two stand in the branch of sources that cancel.
SPARE = {name: 1 + ("product" in name) for name in LAUNCHES if name.startswith("phase_1")}
SPARE["phase_2"] = 2


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name.endswith("partial") else [])
        for name in LAUNCHES
    ],
)
def test_a_missing_barrier_is_noticed(launch: str, emulator: Emulator) -> None:
    """Each barrier of each kernel is deleted in its turn, in every launch of it."""
    case, kernels = Case(hidden=2048, tokens=1, sites=5), dict[str, int]()
    emulator.change = lambda ptx: kernels.update({ptx: len(BARRIER.findall(ptx))}) or ptx
    _compare(emulator, launch, case)
    spare = []
    for kernel, deleted in ((ptx, at) for ptx, found in kernels.items() for at in range(found)):

        def without(ptx: str, kernel: str = kernel, deleted: int = deleted) -> str:
            at = count()
            kept = BARRIER.sub(lambda barrier: "" if next(at) == deleted else barrier[0], ptx)
            return kept if ptx == kernel else ptx

        emulator.change = without
        emulator.moved.clear()
        try:
            _compare(emulator, launch, case)
            spare.append(deleted)
        except RaceError:
            pass
    assert sum(kernels.values()) and len(spare) == SPARE.get(launch, 0), spare
