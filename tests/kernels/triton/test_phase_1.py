"""Phase 1 in the launch of a group's first site, against the float64 run of the specification."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, half_ulp, mix_error, rounding_of_the_answer
from torch import Tensor
from triton_cases import (
    Case,
    Spy,
    cases,
    close,
    floats,
    gain,
    in_turn,
    make_inputs,
    poison,  # noqa: F401
    zeros,
)
from triton_interpreter import (
    DEVICE,
    LAYOUTS,
    RUNNABLE,
    bits,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
    poisoned,
)

from attnres_serve.kernels import backends, comparison, reference
from attnres_serve.kernels.triton import common, mix_group, score_group
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton.answers import GroupConfig
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least, phase_1
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import single_pass

pytestmark = pytest.mark.usefixtures("interpreter")

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}


def _compare(case: Case) -> None:
    """Run a launch and hold state, untouched memory and the three results to the reference."""
    row, later = case.count, case.sites - 1
    inputs = make_inputs(replace(case, spare=case.spare + 1))  # a row to add to
    if not case.fresh:
        inputs.bank[:, row] = inputs.random(case.tokens, case.hidden)
    delta = inputs.vectors()
    out_storage, out = poisoned((case.tokens, case.hidden), case.layout, case.dtype)
    # Room for a whole turn behind the last site, which must stay NaN.
    holes, answers = poisoned((later + 4, case.tokens, case.hidden), case.layout, case.dtype)
    sums = torch.full((later + 4, case.tokens), torch.nan, device=DEVICE)
    if case.layout != "padded":
        sums = sums.t().contiguous().t()
    answers, log_sums = answers[:later], sums[:later]

    blocks = inputs.blocks()
    before = None if case.fresh else inputs.bank[:, row].clone()
    partial = reference.add_partial(before, delta.clone())
    state = inputs.storage.clone()
    view = state.as_strided(inputs.bank.shape, inputs.bank.stride(), inputs.bank.storage_offset())
    view[:, row] = partial
    returned = phase_1(
        *(delta, inputs.bank, inputs.queries, inputs.norm_weight),
        row=row,
        fresh=case.fresh,
        completes=case.completes,
        bias=inputs.bias,
        out=(out, answers, log_sums),
        **EPS,
    )

    assert all(a is b for a, b in zip(returned, (out, answers, log_sums), strict=True))
    assert torch.equal(bits(inputs.storage), bits(state)), "state or untouched rows"
    assert int(out_storage.isnan().sum()) == out_storage.numel() - out.numel(), "padding or holes"
    assert int(holes.isnan().sum()) == holes.numel() - answers.numel(), "padding or holes"
    assert int(sums.isnan().sum()) == sums.numel() - log_sums.numel(), "sites that are none"
    if not case.tokens:
        return
    sources, query = [*blocks, partial], inputs.queries[0]
    mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64, inputs.bias)
    expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
    error = (1 + abs(case.bias or 0)) * mix_error(sources, query)
    close(out, expected, half_ulp(expected, case.dtype) + gain(mixed, inputs.norm_weight) * error)
    if not later:
        return
    finished = sources if case.completes else blocks
    exact = reference.phase_1(finished, inputs.queries[1:], KEY_EPS, torch.float64)
    largest = torch.stack(finished).abs().amax((0, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    for site, query in enumerate(inputs.queries[1:]):
        error = mix_error(finished, query)  # [T, 1]
        close(answers[site], exact[0][site], half_ulp(exact[0][site], case.dtype) + error)
        # The error of a score: that of the mix without the source it multiplies.
        close(log_sums[site], exact[1][site], error[:, 0] / largest)


GRID = cases(
    count=st.integers(1, 15),
    sites=st.sampled_from((1, 2, 3, 4, 5, 9)),
    hidden=st.sampled_from((1, 3, 64, 257, 1000)),
    bias=st.sampled_from((None, 0.7, -3.0)),
    fresh=st.booleans(),
    completes=st.booleans(),
    weight_dtype=st.sampled_from((None, *DTYPES)),
)


@settings(max_examples=30, deadline=None)
@given(GRID)
def test_over_the_grid(case: Case) -> None:
    """Any mix of shape, dtype, layout, magnitude and bias."""
    _compare(case)


ROWS = [
    # The first block of all: it is the only source of every site.
    Case(count=0, completes=True),
    Case(count=0, completes=True, fresh=True, sites=9),
    # No later site: the single pass of one site, completing or not.
    Case(count=0, sites=1),
    Case(sites=1, completes=True),
    # Exactly one turn, one site more, two turns and one more; at 4097 and 8193 turns are shorter.
    *(Case(sites=sites, completes=c) for sites, c in product((4, 5, 9), (False, True))),
    Case(hidden=1),
    Case(hidden=300, sites=6, completes=True),
    Case(hidden=4097, tokens=1, completes=True),
    Case(hidden=8193, tokens=1, count=2, completes=True),
    # The row in the last slot, so that a read past it would leave the bank.
    *(Case(spare=0, layout=layout, sites=5, completes=True) for layout in LAYOUTS),
    # Equal scores, and scores of several tens.
    Case(query_scale=0.0, count=7, completes=True),
    Case(query_scale=4.0, count=8, sites=5),
    # The first site alone has the bias.
    Case(bias=30.0, completes=True),
    Case(bias=-30.0, completes=True),
    Case(scale=1e4, completes=True),
    Case(scale=1e-6),
    Case(tokens=0, completes=True),
]
WIDE_ROWS = [Case(scale=1e15, completes=True), Case(scale=1e-20)]  # beyond half precision's range


@pytest.mark.parametrize(
    "case", in_turn(ROWS) + in_turn(WIDE_ROWS, (torch.float32, torch.bfloat16)), ids=str
)
def test_rows(case: Case) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare(case)


# By the product of many tokens

ANY = {MAX_HIDDEN: Least(logits=1, sites=2)}


@pytest.fixture
def by_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens is many, and two sites are several."""
    monkeypatch.setattr(triton_phase_1, "LEAST", ANY)


@settings(max_examples=25, deadline=None)
@given(GRID)
def test_a_product_over_the_grid(case: Case) -> None:
    """As ``test_over_the_grid``."""
    with pytest.MonkeyPatch.context() as patch:  # hypothesis has no fixture for each example
        patch.setattr(triton_phase_1, "LEAST", ANY)
        _compare(replace(case, dtype=torch.bfloat16))


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    "case",
    # With one site there is no product, and the hidden size is taken in chunks of 512.
    [case for case in (*ROWS, *WIDE_ROWS) if case.sites > 1 and case.hidden < 4097],
    ids=str,
)
def test_rows_by_a_product(case: Case) -> None:
    """The same rows; with more sites than a program scores there is no product."""
    _compare(case)


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    "case",
    [
        # A program of tokens and one more; a whole eighth of sites and one more; the most sites.
        Case(tokens=33, hidden=40, completes=True, fresh=True),
        *(Case(sites=sites, bias=0.7, completes=sites % 2 == 0) for sites in (8, 9, 16, 17, 64)),
        Case(sites=65, hidden=16),
        # Chunks of the hidden size: one less, exactly, and one more.
        *(Case(hidden=hidden, completes=True) for hidden in (511, 512, 513, 1024, 1025)),
    ],
    ids=str,
)
def test_edges_of_a_product(case: Case) -> None:
    """Where its programs begin and end."""
    _compare(case)


@pytest.mark.usefixtures("by_product")
def test_a_product_does_not_depend_on_company() -> None:
    """A token with others of a program or alone, and a site without the later ones: equal bits."""
    case = Case(tokens=34, sites=9, completes=True)
    (out, answers, log_sums), _ = _run(case)
    for few in (slice(1, 2), slice(31, 34)):
        some, _ = _run(case, delta=lambda t, few=few: t[few], bank=lambda t, few=few: t[few])
        assert torch.equal(some[0], out[few]) and torch.equal(some[1], answers[:, few])
        assert torch.equal(some[2], log_sums[:, few])
    case = replace(case, tokens=3)
    (out, answers, log_sums), _ = _run(case)
    for sites in (2, 8):
        fewer, _ = _run(case, queries=lambda t, sites=sites: t[:sites])
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
        phase_1(**_arguments(tokens=many, queries=queries))
    # A program of tokens for each row; the first site's, and for the later ones a chunk each.
    assert launched.grids == [(4, many // 32), (many,), (3 * many,)]
    # What fewer tokens need is compiled, once, and not launched.
    assert otherwise.grids == [(0,)]
    otherwise.grids.clear()
    launched.grids.clear()
    halves = {"delta": zeros(many, 96).half(), "bank": zeros(many, 5, 96).half()}
    phase_1(**_arguments(tokens=many - 1, queries=queries))
    phase_1(**_arguments(**halves, queries=queries))
    phase_1(**_arguments(tokens=many, queries=queries[1:]))
    monkeypatch.setattr(common, "_each_token_alone", True)
    phase_1(**_arguments(tokens=many, queries=queries))
    assert len(otherwise.grids) == 4 and not launched.grids


@pytest.mark.usefixtures("by_product")
@pytest.mark.parametrize(
    "other",
    [
        {"delta": zeros(4, 97), "bank": zeros(4, 5, 97), "queries": floats(3, 97)}
        | {"norm_weight": zeros(97)},
        {"norm_weight": floats(96)},
        {"bias": floats(1)},
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
        phase_1(**_arguments(**changes))
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
    shared = [score_group.CONFIGS[16], score_group.CONFIGS[64]]
    found = {
        sites: score_group.score_group_arguments(
            *(zeros(4, 96), zeros(4, 5, 96), floats(sites, 96), floats(4, 4, 64)),
            **{"row": 3, "fresh": False, "key_eps": KEY_EPS},
        )
        for sites in (1, 16, 17, 32, 33, 64)
    }
    of_32 = score_group.CONFIGS[32] if at == (9, 0) else shared[1]
    for sites, config in ((1, shared[0]), (16, shared[0]), (17, of_32), (32, of_32)):
        assert _product_config(found[sites]) == config
    assert _product_config(found[33]) == _product_config(found[64]) == shared[1]
    assert {device.type for device in asked} == {torch.device(DEVICE).type}


def _product_config(arguments: dict[str, object]) -> tuple[object, ...]:
    return arguments["TOKENS"], arguments["CHUNK"], arguments["num_warps"]


def _run(case: Case, **changes: object) -> tuple[tuple[Tensor, ...], Tensor]:
    """Results and bank of a launch with one random row to add to."""
    inputs = make_inputs(replace(case, spare=1))
    inputs.bank[:, case.count] = inputs.random(case.tokens, case.hidden)
    arguments = {
        "delta": inputs.vectors(),
        "bank": inputs.bank,
        "queries": inputs.queries,
        "norm_weight": inputs.norm_weight,
        "row": case.count,
        "fresh": case.fresh,
        "completes": case.completes,
    }
    arguments |= {k: v(arguments[k]) if callable(v) else v for k, v in changes.items()}
    return phase_1(**arguments, **EPS), inputs.bank


@pytest.mark.parametrize("completes", [False, True])
def test_a_dominating_score_selects_its_source(completes: bool) -> None:
    """A row along a long query takes all of that site, and no other site is moved by it.

    A partial sum is never the source of a later site, however it scores.
    """
    for chosen in range(5):
        inputs = make_inputs(Case(sites=3))
        along = inputs.queries[2].to(torch.bfloat16)
        delta = inputs.vectors()
        (delta if chosen == 4 else inputs.bank[:, chosen]).copy_(along)
        inputs.queries[2] *= 50
        _, answers, log_sums = phase_1(
            *(delta, inputs.bank, inputs.queries, inputs.norm_weight),
            **{"row": 4, "fresh": True, "completes": completes},
            **EPS,
        )
        finished = [inputs.bank[:, i] for i in range(4 + completes)]
        if chosen < len(finished):
            assert torch.equal(answers[1], inputs.bank[:, chosen])
            score = reference.scores(finished[chosen].float(), inputs.queries[2], KEY_EPS)
            torch.testing.assert_close(log_sums[1], score)
        exact, _ = reference.mix(finished, inputs.queries[1], KEY_EPS, torch.float64)
        torch.testing.assert_close(answers[0].double(), exact, rtol=2**-7, atol=1e-5)


def test_results_do_not_depend_on_company() -> None:
    """A token alone, and a site without the later ones, get the bits that they get among others."""
    case = Case(sites=9, completes=True)
    (out, answers, log_sums), _ = _run(case)
    alone, _ = _run(case, delta=lambda t: t[1:2], bank=lambda t: t[1:2])
    assert torch.equal(alone[0], out[1:2]) and torch.equal(alone[1], answers[:, 1:2])
    assert torch.equal(alone[2], log_sums[:, 1:2])
    for sites in (1, 2, 5, 8):
        fewer, _ = _run(case, queries=lambda t, sites=sites: t[:sites])
        assert torch.equal(fewer[0], out) and torch.equal(fewer[1], answers[: sites - 1])
        assert torch.equal(fewer[2], log_sums[: sites - 1])


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
    case = Case(sites=10, dtype=dtype, completes=completes, fresh=fresh, bias=0.7)
    found = []
    for few in (0, 128):
        monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
        (out, answers, log_sums), bank = _run(case)
        found.append([bits(tensor) for tensor in (out, answers, log_sums, bank)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("fresh", [False, True])
def test_the_first_site_is_a_single_pass(fresh: bool) -> None:
    """The same state bit for bit and the same result to rounding, whatever later sites read."""
    results = []
    for completes in (False, True):
        (out, *_), bank = _run(Case(fresh=fresh, completes=completes))
        results.append((out, bank))
    inputs = make_inputs(Case())
    inputs.bank[:, 4] = inputs.random(3, 257)
    expected = single_pass(
        *(inputs.vectors(), inputs.bank, inputs.queries[0], inputs.norm_weight),
        **{"row": 4, "fresh": fresh},
        **EPS,
    )
    for out, bank in results:
        assert torch.equal(bits(bank), bits(inputs.bank))
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("config", [(1, 1), (2, 2), (8, 4)], ids=str)
@pytest.mark.parametrize("completes", [False, True])
def test_configs_agree(config: tuple[int, int], completes: bool) -> None:
    """Turns that divide the number of sites, do not, and exceed it."""
    case = Case(sites=5, completes=completes, dtype=torch.float32)
    expected, _ = _run(case)
    actual, _ = _run(case, config=GroupConfig(*config))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "sites"), [(1, 4), (3, 3)], ids=["full", "blocks of three"])
def test_groups_of_sites_in_order(block: int, sites: int, dtype: torch.dtype) -> None:
    """A model's depth by groups: exact state throughout, results within the stated rounding.

    Blocks of three sublayers, each a group of its own; and blocks of one, four to a group, where a
    merge reads the rows finished since the group was opened.
    """
    inputs = make_inputs(Case(count=1, sites=12, spare=12 // block, dtype=dtype, scale=3.0))
    finished, partial = inputs.blocks(), None
    for site, query in enumerate(inputs.queries):
        delta = inputs.vectors()
        fresh = site % block == 0
        partial = reference.add_partial(None if fresh else partial, delta.clone())
        row, weight = len(finished), inputs.norm_weight
        completes = (site + 1) % block == 0
        sources = [*finished, partial]
        # A group opens where a block ends.
        position = (site + 1) % sites
        if position == 0:
            group = inputs.queries[site : site + sites]
            opened = {"row": row, "fresh": fresh, "completes": True}
            out, *answers = phase_1(delta, inputs.bank, group, weight, **opened, **EPS)
            answered, first = len(sources), row + 1
        elif site < sites:  # before the first group
            common = {"row": row, "fresh": fresh}
            out = single_pass(delta, inputs.bank, query, weight, **common, **EPS)
            answered = 0
        else:
            common = {"row": row, "fresh": fresh, "position": position - 1, "first": first}
            out = phase_2(delta, inputs.bank, *answers, query, weight, **common, **EPS)
        if completes:
            finished.append(partial)
        assert torch.equal(bits(inputs.bank[:, : row + 1]), bits(torch.stack(sources, 1)))
        assert out.dtype == dtype and out.is_contiguous()
        mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
        expected = reference.rms_norm(mixed, weight, NORM_EPS)
        # Two scores stand behind a merge, one in each phase.
        error = 2 * gain(mixed, weight) * mix_error(sources, query)
        if position and answered:
            error = error + rounding_of_the_answer(sources, query, weight, dtype, answered)
        close(out, expected, half_ulp(expected, dtype) + error)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_the_comparison_at_the_start_launches_each_way(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """It finds nothing, with turns side by side, in turn, and with a product."""
    few, some, many = (copies * comparison.TOKENS for copies in (1, 2, 3))
    monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
    logits = many * comparison.BLOCKS * comparison.SITES
    monkeypatch.setattr(triton_phase_1, "LEAST", {MAX_HIDDEN: Least(logits, sites=2)})
    runs = [(name, 1) for name in comparison.ALGORITHMS]
    runs += [("two_phase", some // few), ("two_phase", many // few)]
    monkeypatch.setattr(comparison, "runs_of", lambda *given: runs)
    backend = backends.load("triton")
    backend.prepare()
    assert comparison.difference(backend, 64, dtype, torch.device(DEVICE)) is None
    shape = comparison.BLOCKS, comparison.SITES, 64, dtype
    assert [triton_phase_1.by_product(tokens, *shape) for tokens in (some, many)] == [
        False,
        dtype == torch.bfloat16,
    ]


# Contracts


def _arguments(tokens: int = 4, **changes: object) -> dict[str, object]:
    """Valid arguments, with changes."""
    return (
        {
            "delta": zeros(tokens, 96),
            "bank": zeros(tokens, 5, 96),
            "queries": floats(3, 96),
            "norm_weight": zeros(96),
            "row": 3,
            "fresh": False,
            "completes": True,
        }
        | EPS
        | changes
    )


def test_one_launch_and_none_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per token, however many sites; no tokens, no launch.

    Of few tokens there is one for each turn, and one launch before it.
    """
    spy = Spy()
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", spy)
    for few in (0, 128):
        monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
        for sites in (1, 3, 9):
            phase_1(**_arguments(queries=floats(sites, 96)))
    out, answers, log_sums = phase_1(**_arguments(tokens=0))
    assert out.shape == (0, 96) and answers.shape == (2, 0, 96) and log_sums.shape == (2, 0)
    assert spy.grids == [(4, 1)] * 6 + [(4, 3)]


def test_no_stride_of_a_result_depends_on_the_tokens() -> None:
    """Strides are specialised by Triton: with another batch there would be another binary."""
    strides = {phase_1(**_arguments(tokens=tokens))[1].stride() for tokens in (2, 5)}
    assert len(strides) == 1


REFUSALS = {
    "one query": (
        lambda: {"queries": floats(96)},
        r"queries must be \[sites, hidden\], not \[96\]",
    ),
    "no site": (lambda: {"queries": floats(0, 96)}, r"must be \[sites, hidden\], not \[0, 96\]"),
    "queries in a half": (lambda: {"queries": zeros(3, 96)}, "queries is torch.bfloat16; it is"),
    "queries of another size": (
        lambda: {"queries": floats(3, 95)},
        r"queries is \[3, 95\], not \[3, 96\]",
    ),
    "strided queries": (
        lambda: {"queries": floats(3, 192)[:, ::2]},
        "must have unit stride",
    ),
    "queries elsewhere": (
        lambda: {"queries": torch.empty(3, 96, device="meta")},
        f"is on meta but delta on {DEVICE}",
    ),
    "other tokens": (lambda: {"bank": zeros(3, 5, 96)}, r"bank \[3, 5, 96\] does not fit delta"),
    "no such row": (lambda: {"row": 5}, "row 5 is outside the 5 slots of the bank"),
    "nothing for later sites": (
        lambda: {"row": 0, "completes": False},
        "row 0 is a partial sum, so later sites have no finished block",
    ),
    "bias in a half": (lambda: {"bias": zeros(1)}, r"bias is \[1\] torch.bfloat16"),
    "weight of another size": (lambda: {"norm_weight": zeros(95)}, r"norm_weight is \[95\], not"),
    "out of another shape": (
        lambda: {"out": (zeros(4, 95), zeros(2, 4, 96), floats(2, 4))},
        r"out is \[4, 95\]",
    ),
    "answers for all sites": (
        lambda: {"out": (zeros(4, 96), zeros(3, 4, 96), floats(2, 4))},
        r"answers is \[3, 4, 96\] torch.bfloat16, not \[2, 4, 96\]",
    ),
    "sums in a half": (
        lambda: {"out": (zeros(4, 96), zeros(2, 4, 96), zeros(2, 4))},
        r"log_sums is \[2, 4\] torch.bfloat16, not \[2, 4\] torch.float32",
    ),
    "expanded answers": (
        lambda: {"out": (zeros(4, 96), zeros(1, 4, 96).expand(2, 4, 96), floats(2, 4))},
        "answers is written and its rows overlap",
    ),
    "expanded bank": (
        lambda: {"bank": zeros(1, 5, 96).expand(4, 5, 96)},
        "bank is written and its rows overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    changes, sentence = REFUSALS[name]
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", None)
    with pytest.raises((TypeError, ValueError), match=sentence):
        phase_1(**_arguments(**changes()))


def test_refuses_results_that_share_memory() -> None:
    """Writing a result must not change what another program still reads."""
    arguments = _arguments()
    bank, delta = arguments["bank"], arguments["delta"]
    results = zeros(4, 96), zeros(2, 4, 96), floats(2, 4)
    shared = bank[:, :2].transpose(0, 1)
    with pytest.raises(ValueError, match="answers must not share memory with bank"):
        phase_1(**arguments, out=(results[0], shared, results[2]))
    with pytest.raises(ValueError, match="out must not share memory with delta"):
        phase_1(**arguments, out=(delta, *results[1:]))
    with pytest.raises(ValueError, match="out must not share memory with answers"):
        phase_1(**arguments, out=(results[1][0], *results[1:]))


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_phase_1_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
