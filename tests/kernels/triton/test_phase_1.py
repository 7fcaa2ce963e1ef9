"""Phase 1 in the launch of a group's first site, against the float64 run of the specification.

``test_backend.py`` asks it what every backend is asked.
"""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from kernel_cases import (
    DTYPES,
    KEY_EPS,
    MASKS,
    NORM_EPS,
    ROWS,
    WIDE_ROWS,
    Case,
    half_ulp,
    identify,
    mix_error,
)
from triton_cases import Spy, close, floats, poison, valid, zeros  # noqa: F401
from triton_interpreter import DEVICE, bits

from attnres_serve.kernels import backends, comparison, reference
from attnres_serve.kernels.triton import common, mix_group, score_group
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least, phase_1
from benchmarks.kernels.compile_ahead import Recorder
from tests.kernels import test_backends as every_backend
from tests.kernels.test_backends import Layout

pytestmark = pytest.mark.usefixtures("interpreter", "poison")

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}


def _compare(
    case: Case, dtype: torch.dtype, sites: int, fresh: bool, completes: bool, layout: Layout
) -> None:
    """Run a launch and hold state, untouched memory and the three results to the reference."""
    case = replace(case, device=DEVICE)
    *blocks, last = case.sources(dtype)
    partial, delta = (None, last) if fresh else every_backend.split(last)
    bank, _ = every_backend.make_bank(blocks, partial, delta, layout)
    x = every_backend.make_delta(delta, layout)
    weights = [every_backend.site(case, dtype, number) for number in range(sites)]
    biases = None if case.bias is None else torch.stack([one.bias for one in weights])
    queries = torch.stack([every_backend.folded(one) for one in weights])
    completes = completes or not blocks
    where = {"row": len(blocks), "fresh": fresh, "completes": completes}
    with every_backend.unchanged(queries, weights):
        out, answers, log_sums = phase_1(
            *(x, bank, queries, weights[0].norm_weight), biases=biases, **where, **EPS
        )
    updated = every_backend.check_state(x, bank, blocks, partial, delta)
    assert torch.equal(updated, reference.add_partial(partial, delta))
    every_backend.check(out, [*blocks, updated], weights[0])
    assert answers.shape == (sites - 1, *delta.shape) and log_sums.shape == answers.shape[:2]
    if sites == 1 or not case.tokens:
        return
    finished = [*blocks, updated] if completes else blocks
    own = None if biases is None else biases[1:, : len(finished)]
    exact = reference.phase_1(finished, queries[1:], KEY_EPS, torch.float64, own)
    largest = torch.stack(finished).abs().amax((0, 2)).double()
    for site, query in enumerate(queries[1:]):
        error = mix_error(finished, query, None if own is None else own[site])  # [T, 1]
        close(answers[site], exact[0][site], half_ulp(exact[0][site], dtype) + error)
        # The error of a score: that of the mix without the source it multiplies.
        close(log_sums[site], exact[1][site], error[:, 0] / largest)


# Exactly one turn, one site more, two turns and one more; at 4097 and 8193 turns are shorter.
SITES = (3, 1, 4, 5, 9)
OWN = [
    *(Case(tokens=1, hidden=hidden, count=3) for hidden in (300, 513, 4097, 8193)),
    *(Case(bias=bias) for bias in (0.7, 30.0, *MASKS)),
    *(Case(norm_dtype=dtype) for dtype in DTYPES),
]
LAYOUTS = [every_backend.DENSE, *every_backend.LAYOUTS.values()]
WAYS = [*product((False, True), repeat=2)]  # fresh, completes
TURNS = [
    (replace(case, tokens=min(case.tokens, 3)), dtype, sites, *way, layout)
    for case, dtype, sites, way, layout in zip(
        *(ROWS + OWN + WIDE_ROWS, cycle((torch.bfloat16, torch.float32, torch.float16))),
        *(cycle(SITES), cycle(WAYS[::-1] + WAYS), cycle(LAYOUTS)),
        strict=False,
    )
    if dtype != torch.float16 or case not in WIDE_ROWS
]


@pytest.mark.parametrize(
    ("case", "dtype", "sites", "fresh", "completes", "layout"), TURNS, ids=identify
)
def test_rows(
    case: Case, dtype: torch.dtype, sites: int, fresh: bool, completes: bool, layout: Layout
) -> None:
    """Dtypes, sites, ways and layouts in turn."""
    _compare(case, dtype, sites, fresh, completes, layout)


# By the product of many tokens

ANY = {MAX_HIDDEN: Least(logits=1, sites=2)}


@pytest.fixture
def by_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens is many, and two sites are several."""
    monkeypatch.setattr(triton_phase_1, "LEAST", ANY)


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    ("case", "dtype", "sites", "fresh", "completes", "layout"),
    [turn for turn in TURNS if turn[0].hidden < 1000][::2],  # all ways among them
    ids=identify,
)
def test_rows_by_a_product(
    case: Case, dtype: torch.dtype, sites: int, fresh: bool, completes: bool, layout: Layout
) -> None:
    """Every other of these rows; with one site there is no product."""
    _compare(case, torch.bfloat16, sites, fresh, completes, layout)


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    ("case", "sites"),
    [
        # A program of tokens and one more; a whole eighth of sites and one more; the most sites.
        (Case(tokens=33, hidden=40), 3),
        *((Case(tokens=3, bias=0.7), sites) for sites in (8, 16, 17, 64)),
        (Case(tokens=3, hidden=16), 65),
        # Chunks of the hidden size: one less, exactly, and one more.
        *((Case(tokens=3, hidden=hidden), 3) for hidden in (511, 512, 513, 1024, 1025)),
    ],
    ids=identify,
)
def test_edges_of_a_product(case: Case, sites: int) -> None:
    """Where its programs begin and end."""
    _compare(case, torch.bfloat16, sites, sites > 16, sites % 2 == 1, every_backend.DENSE)


def _run(dtype: torch.dtype = torch.bfloat16, tokens: int = 3, **changes: object):
    """Results and bank of a launch of nine sites that adds to a row; changes are functions."""
    case = Case(tokens=tokens, count=5, hidden=257, device=DEVICE)
    *blocks, last = case.sources(dtype)
    partial, delta = every_backend.split(last)
    bank, _ = every_backend.make_bank(blocks, partial, delta)
    arguments = {
        "delta": delta,
        "bank": bank,
        "queries": torch.stack(case.queries(9)),
        "norm_weight": case.norm_weight(dtype),
        "row": 4,
        "fresh": False,
        "completes": True,
    }
    arguments |= {k: v(arguments[k]) if callable(v) else v for k, v in changes.items()}
    return phase_1(**arguments, **EPS), bank


@pytest.mark.parametrize("many", [False, True])
def test_results_do_not_depend_on_company(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site without the later ones gets the bits that it gets among others.

    So does a token, of another program of tokens too; ``test_batch.py`` has one alone.
    """
    monkeypatch.setattr(triton_phase_1, "LEAST", ANY if many else triton_phase_1.LEAST)
    tokens = 33 if many else 3  # a program of tokens, and one
    (out, answers, log_sums), _ = _run(tokens=tokens)
    few = slice(tokens - 2, tokens)
    some, _ = _run(tokens=tokens, delta=lambda t: t[few], bank=lambda t: t[few])
    assert torch.equal(some[0], out[few]) and torch.equal(some[1], answers[:, few])
    assert torch.equal(some[2], log_sums[:, few])
    for sites in (8,) if many else (1, 5):
        fewer, _ = _run(tokens=tokens, queries=lambda t, sites=sites: t[:sites])
        assert torch.equal(fewer[0], out) and torch.equal(fewer[1], answers[: sites - 1])
        assert torch.equal(fewer[2], log_sums[: sites - 1])


def test_many_tokens_in_bfloat16_are_scored_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither fewer, nor another dtype, nor any in the batch-invariant mode."""
    launched = Spy()
    monkeypatch.setattr(score_group, "score_group_kernel", launched)
    monkeypatch.setattr(mix_group, "weigh_group_kernel", launched)
    monkeypatch.setattr(mix_group, "mix_group_kernel", launched)
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", otherwise := Spy())
    monkeypatch.setattr(common, "_compiled", set())
    many, queries = 6144, floats(16, 96)  # of four rows
    for _ in range(2):
        launched.grids.clear()
        phase_1(**valid(phase_1, tokens=many, queries=queries))
    # A program of tokens for each row; the first site's, and for the later ones a chunk each.
    assert launched.grids == [(4, many // 32), (many,), (3 * many,)]
    # What fewer tokens need is compiled, once, and not launched.
    assert otherwise.grids == [(0,)]
    otherwise.grids.clear()
    launched.grids.clear()
    halves = {"delta": zeros(many, 96).half(), "bank": zeros(many, 5, 96).half()}
    phase_1(**valid(phase_1, tokens=many - 1, queries=queries))
    phase_1(**valid(phase_1, **halves, queries=queries))
    phase_1(**valid(phase_1, tokens=many, queries=queries[1:]))
    monkeypatch.setattr(common, "_each_token_alone", True)
    phase_1(**valid(phase_1, tokens=many, queries=queries))
    assert len(otherwise.grids) == 4 and not launched.grids


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    "other",
    [
        {"delta": zeros(4, 97), "bank": zeros(4, 5, 97), "queries": floats(3, 97)}
        | {"norm_weight": zeros(97)},
        {"norm_weight": floats(96)},
        {"biases": floats(3, 4)},
        {"fresh": True},
        {"completes": False},
        {"early": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_product_compiles_what_fewer_tokens_need(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    """Once for each kind of launch, and without a launch."""
    for module, name in (
        *((score_group, "score_group_kernel"), (mix_group, "weigh_group_kernel")),
        (mix_group, "mix_group_kernel"),
    ):
        monkeypatch.setattr(module, name, Spy())
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", spy := Spy())
    monkeypatch.setattr(common, "_compiled", set())

    def run(early: bool = False, **changes: object) -> list[tuple[int, ...]]:
        spy.grids.clear()
        monkeypatch.setattr(triton_phase_1, "starts_early", lambda device: early)
        phase_1(**valid(phase_1, **changes))
        return spy.grids

    for kind in ({}, other):
        assert run(**kind) == [(0,)] and run(**kind) == []
    assert run() == []


@pytest.mark.parametrize(
    ("hidden", "logits", "sites"), [(2048, 393216, 16), (2049, 98304, 8), (4097, 98304, 6)]
)
def test_large_rows_are_many_sooner(hidden: int, logits: int, sites: int) -> None:
    """And the most sites are those that a program scores."""

    def chosen(tokens: int, count: int) -> bool:
        return triton_phase_1.by_product(tokens, 4, count, hidden, torch.bfloat16)

    tokens = logits // (4 * sites)
    assert chosen(tokens, sites) and chosen(tokens, score_group.MAX_SITES)
    assert not chosen(tokens - 1, sites) and not chosen(2 * tokens, sites - 1)
    assert not chosen(tokens, score_group.MAX_SITES + 1)


@pytest.mark.parametrize("at", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_a_product_spills_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, at: tuple[int, int] | None
) -> None:
    """The config of 17 to 32 sites is another one on a Hopper GPU; the others are the same."""
    asked = []
    monkeypatch.setattr(score_group, "capability", lambda device: asked.append(device) or at)
    monkeypatch.setattr(score_group, "score_group_kernel", launched := Recorder())
    where = {"row": 3, "fresh": False, "key_eps": KEY_EPS}
    for sites in (1, 16, 17, 32, 33, 64):
        score_group.score_group(zeros(4, 96), zeros(4, 5, 96), floats(sites, 96), **where)
    found = [(one["TOKENS"], one["CHUNK"], one["num_warps"]) for one in launched.arguments]
    few, most = score_group.CONFIGS[16], score_group.CONFIGS[64]
    of_32 = score_group.CONFIGS[32] if at == (9, 0) else most
    assert found == [few, few, of_32, of_32, most, most]
    assert {device.type for device in asked} == {torch.device(DEVICE).type}


@pytest.mark.parametrize(
    ("dtype", "completes", "fresh"),
    [
        (torch.bfloat16, False, False),
        (torch.float16, False, True),
        (torch.float32, True, False),
        (torch.bfloat16, True, True),
    ],
    ids=str,
)
def test_turns_side_by_side_give_the_bits_of_turns_in_turn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, completes: bool, fresh: bool
) -> None:
    """What a token gets does not depend on how many there are: state, result and answers."""
    found, biases = [], torch.randn(9, 5).to(DEVICE)
    for few in (0, 128):
        monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
        (out, answers, log_sums), bank = _run(
            dtype, completes=completes, fresh=fresh, biases=biases
        )
        found.append([bits(tensor) for tensor in (out, answers, log_sums, bank)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_comparison_at_the_start_launches_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nothing, with turns side by side, in turn, and with a product."""
    monkeypatch.setattr(comparison, "SITES", 4)
    few, some, many = (copies * comparison.TOKENS for copies in (1, 2, 3))
    monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
    logits = many * comparison.BLOCKS * comparison.SITES
    monkeypatch.setattr(triton_phase_1, "LEAST", {MAX_HIDDEN: Least(logits, sites=2)})
    runs = [(name, 1) for name in comparison.ALGORITHMS]
    runs += [("two_phase", some // few), ("two_phase", many // few)]
    monkeypatch.setattr(comparison, "runs_of", lambda *given: runs)
    given = 64, torch.bfloat16
    assert comparison.difference(backends.load("triton"), *given, torch.device(DEVICE)) is None
    shape = comparison.BLOCKS, comparison.SITES, *given
    assert [triton_phase_1.by_product(tokens, *shape) for tokens in (some, many)] == [False, True]


def test_one_launch_and_none_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per token, however many sites; no tokens, no launch.

    Of few tokens there is one for each turn, and one launch before it.
    """
    spy = Spy()
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", spy)
    for few in (0, 128):
        monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
        for sites in (1, 3, 9):
            phase_1(**valid(phase_1, queries=floats(sites, 96)))
    out, answers, log_sums = phase_1(**valid(phase_1, tokens=0))
    assert out.shape == (0, 96) and answers.shape == (2, 0, 96) and log_sums.shape == (2, 0)
    assert spy.grids == [(4, 1)] * 6 + [(4, 3)]


def test_no_stride_of_a_result_depends_on_the_tokens() -> None:
    """Strides are specialised by Triton: with another batch there would be another binary."""
    strides = {phase_1(**valid(phase_1, tokens=tokens))[1].stride() for tokens in (2, 5)}
    assert len(strides) == 1
