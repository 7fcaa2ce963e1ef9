"""Score on write against the float64 run of the specification, and the bound of row skipping."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, ROUNDINGS, half_ulp, mix_error
from torch import Tensor
from triton_cases import (
    Case,
    Spy,
    cases,
    close,
    floats,
    gain,
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

from attnres_serve.kernels import reference
from attnres_serve.kernels.triton import mix_scored as mix_scored_module
from attnres_serve.kernels.triton import score_rows as score_rows_module
from attnres_serve.kernels.triton.common import Config
from attnres_serve.kernels.triton.mix_scored import mix_scored
from attnres_serve.kernels.triton.score_rows import score_rows
from attnres_serve.kernels.triton.single_pass import single_pass
from attnres_serve.kernels.triton.two_phase import GroupConfig

pytestmark = pytest.mark.usefixtures("interpreter")

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}


def _scores(case: Case, slots: int) -> Tensor:
    """NaN for every site and slot; ``slots first`` has the sites of a row side by side."""
    scores = torch.full((case.tokens, slots, case.sites), torch.nan, device=DEVICE)
    scores = scores.transpose(1, 2)
    return scores if case.layout == "slots first" else scores.contiguous()


def _check_logits(found: Tensor, row: Tensor, queries: Tensor) -> None:
    """``[T, S]`` logits of a row: the error of a mix without the source it multiplies."""
    largest = row.abs().amax(1).double().clamp(min=torch.finfo(torch.float64).tiny)
    for site, query in enumerate(queries):
        expected = reference.scores(row.double(), query.double(), KEY_EPS)
        close(found[:, site], expected, mix_error([row], query)[:, 0] / largest)


def _compare_scores(case: Case) -> None:
    """Score rows up to the last one finished: nothing else is written."""
    inputs = make_inputs(case)
    state, scores = inputs.storage.clone(), _scores(case, case.count + 1)
    first = min(1, case.count - 1)
    rows = {"first": first, "count": case.count - first}
    returned = score_rows(inputs.bank, inputs.queries, scores, **rows, key_eps=KEY_EPS)
    assert returned is scores
    assert torch.equal(bits(inputs.storage), bits(state)), "the bank is only read"
    assert scores[:, :, :first].isnan().all() and scores[:, :, case.count].isnan().all()
    for index in range(first, case.count):
        if case.tokens:
            _check_logits(scores[:, :, index], inputs.bank[:, index], inputs.queries)


@settings(max_examples=30, deadline=None)
@given(
    cases(
        count=st.integers(1, 6),
        sites=st.sampled_from((1, 3, 4, 5, 9)),
        hidden=st.sampled_from((1, 3, 64, 257, 1000)),
    )
)
def test_scores_over_the_grid(case: Case) -> None:
    """Any mix of shape, dtype, layout and magnitude."""
    _compare_scores(case)


SCORE_ROWS = [
    # Every padded size has a config of its own.
    Case(hidden=300, sites=5),
    Case(hidden=1025, sites=5),
    Case(hidden=4097, tokens=1, count=2),
    Case(hidden=8193, tokens=1, count=2),
    # No slot behind the last row, so that a read past it would leave the bank.
    *(Case(spare=0, layout=layout) for layout in LAYOUTS),
    Case(scale=1e15),
    Case(scale=1e-20),
    Case(tokens=0),
]


@pytest.mark.parametrize("case", SCORE_ROWS, ids=str)
def test_score_rows(case: Case) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare_scores(case)


@pytest.mark.parametrize("programs", [1, 4, 7, 2048])
def test_a_logit_does_not_depend_on_its_company(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that takes several tokens in turn, and one site, token or row alone, give the
    bits."""
    case = Case(tokens=7, sites=9)
    inputs = make_inputs(case)
    scores = _scores(case, 4)
    monkeypatch.setattr(score_rows_module, "SCORE_PROGRAMS", programs)
    score_rows(inputs.bank, inputs.queries, scores, first=2, count=2, key_eps=KEY_EPS)
    monkeypatch.setattr(score_rows_module, "SCORE_PROGRAMS", 2048)
    for token, site in product(range(7), (0, 3, 8)):
        alone = floats(1, 1, 4)
        one, query = slice(token, token + 1), inputs.queries[site : site + 1]
        score_rows(inputs.bank[one], query, alone, first=3, count=1, key_eps=KEY_EPS)
        assert alone[0, 0, 3] == scores[token, site, 3]


@pytest.mark.parametrize("config", [(1, 1), (2, 2), (8, 4)], ids=str)
def test_score_configs_agree(config: tuple[int, int]) -> None:
    """Groups that divide the number of sites, do not, and exceed it."""
    case = Case(sites=5)
    inputs = make_inputs(case)
    results = []
    for chosen in (None, GroupConfig(*config)):
        what = {"first": 0, "count": 4, "key_eps": KEY_EPS, "config": chosen}
        results.append(score_rows(inputs.bank, inputs.queries, _scores(case, 4), **what))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


# The site


def _known_scores(case: Case, rows: list[Tensor], queries: Tensor) -> Tensor:
    """Exact logits, rounded to float32; what is not there is NaN."""
    scores = _scores(case, len(rows) + 1)
    for index, row in enumerate(rows):
        for site, query in enumerate(queries):
            exact = reference.scores(row.double(), query.double(), KEY_EPS)
            scores[:, site, index] = exact.float()
    return scores


def _compare_mix(case: Case, skip_below: float = 0.0) -> None:
    """Run a site and hold state, untouched memory and result to the reference.

    The known logits are exact ones, rounded: what their own error costs is the last test's.
    """
    row = case.count
    inputs = make_inputs(replace(case, spare=case.spare + 1))
    if not case.fresh:
        inputs.bank[:, row] = inputs.random(case.tokens, case.hidden)
    delta, position = inputs.vectors(), case.seed % case.sites
    query = inputs.queries[position]
    before = None if case.fresh else inputs.bank[:, row].clone()
    partial = reference.add_partial(before, delta.clone())
    sources = [*inputs.blocks(), partial]
    scores = _known_scores(case, sources[:-1], inputs.queries)
    scores[:, :position] = torch.nan
    scores[:, position + 1 :] = torch.nan
    out_storage, out = poisoned((case.tokens, case.hidden), case.layout, case.dtype)
    state = inputs.storage.clone()
    view = state.as_strided(inputs.bank.shape, inputs.bank.stride(), inputs.bank.storage_offset())
    view[:, row] = partial
    scores_before = scores.clone()

    returned = mix_scored(
        *(delta, inputs.bank, scores, query, inputs.norm_weight),
        row=row,
        position=position,
        fresh=case.fresh,
        skip_below=skip_below,
        bias=inputs.bias,
        out=out,
        **EPS,
    )

    assert returned is out
    assert torch.equal(bits(inputs.storage), bits(state)), "state or untouched rows"
    assert torch.equal(bits(scores), bits(scores_before))
    assert int(out_storage.isnan().sum()) == out_storage.numel() - out.numel(), "padding or holes"
    if not case.tokens:
        return
    stacked = torch.stack(sources, 1).double()
    logits = reference.scores(stacked, query.double(), KEY_EPS)
    logits[:, -1] += case.bias or 0
    weights = torch.softmax(logits, -1)
    kept = weights > skip_below
    kept[:, -1] = True
    mixed = ((weights * kept)[..., None] * stacked).sum(1)
    expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
    # A known logit is rounded once, whatever its size; the bias enlarges that of the last one.
    error = (1 + abs(case.bias or 0)) * mix_error(sources, query)
    close(out, expected, half_ulp(expected, case.dtype) + gain(mixed, inputs.norm_weight) * error)


@settings(max_examples=50, deadline=None)
@given(
    cases(
        count=st.integers(0, 16),
        sites=st.integers(1, 4),
        hidden=st.sampled_from((1, 3, 64, 257, 1000, 4097)),
        bias=st.sampled_from((None, 0.7, -3.0)),
        fresh=st.booleans(),
        weight_dtype=st.sampled_from((None, *DTYPES)),
    ),
    st.sampled_from((0.0, 0.0, 1e-3, 0.02, 0.15)),
)
def test_mix_scored_over_the_grid(case: Case, skip_below: float) -> None:
    """Any mix of shape, dtype, layout, magnitude, bias and rows left out."""
    if case.query_scale == 0.0:
        skip_below = 0.0  # all weights equal: a rounding would decide who is left out
    _compare_mix(case, skip_below)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        # The only source.
        Case(count=0),
        Case(count=0, fresh=True),
        # One tile, and a tile that is partly filled.
        Case(count=2),
        Case(count=3, fresh=True),
        *(Case(spare=0, layout=layout) for layout in LAYOUTS),
        # Scores of several tens: weights underflow to zero, and their rows are not read.
        *(Case(query_scale=8.0, count=8, seed=seed) for seed in range(3)),
        Case(bias=30.0),
        Case(bias=-30.0),
        Case(scale=1e15),
        Case(scale=1e-20),
        Case(hidden=8193, tokens=1, count=2),
        Case(tokens=0),
    ],
    ids=str,
)
def test_mix_scored_rows(case: Case) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare_mix(case)


@pytest.mark.parametrize("config", [(1, 1), (2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("skip_below", [0.0, 0.1])
def test_mix_configs_agree(config: tuple[int, int], skip_below: float) -> None:
    """Tiles that divide the number of rows, do not, and exceed it."""
    outs = []
    for chosen in (None, Config(*config)):
        inputs = make_inputs(Case(count=5, dtype=torch.float32))
        scores = _known_scores(inputs.case, inputs.blocks(), inputs.queries)
        inputs = replace(inputs, bank=torch.cat([inputs.bank, inputs.bank[:, :1]], 1))
        common = {"row": 5, "position": 0, "fresh": True}
        what = common | {"skip_below": skip_below, "config": chosen}
        tensors = inputs.vectors(), inputs.bank, scores, inputs.queries[0], inputs.norm_weight
        outs.append(mix_scored(*tensors, **what, **EPS))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Alone it gets the bits it gets among others."""
    together, alone = _arguments(), _arguments()
    alone |= {name: alone[name][2:3] for name in ("delta", "bank", "scores")}
    assert torch.equal(mix_scored(**together)[2:3], mix_scored(**alone))


# Rows left out


def _equal_weights(rows: Tensor, skip_below: float, norm_eps: float = NORM_EPS) -> Tensor:
    """A site of one token over ``rows``, ``[n, d]`` float32, each of weight 1 / n.

    The last row begins here; the query is zero, and so is every logit.
    """
    count, hidden = rows.shape
    return mix_scored(
        *(rows[-1:].clone(), rows[None].clone(), floats(1, 1, count), floats(hidden)),
        torch.ones(hidden, device=DEVICE),
        row=count - 1,
        position=0,
        fresh=True,
        key_eps=KEY_EPS,
        norm_eps=norm_eps,
        skip_below=skip_below,
    )[0].double()


def test_a_row_at_the_threshold_is_left_out_and_one_above_is_not() -> None:
    """Four equal weights are a quarter exactly; "at or below" is the kernel's comparison."""
    rows = torch.randn(4, 96).to(DEVICE)
    just_below = 0.25 - 2**-26
    alone = reference.rms_norm(rows[3].double() / 4, torch.ones(96).to(rows), NORM_EPS)
    torch.testing.assert_close(_equal_weights(rows, 0.25), alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(_equal_weights(rows, just_below), _equal_weights(rows, 0.0))
    rows[1] = torch.nan
    assert _equal_weights(rows, just_below).isnan().all(), "its row is read"
    assert not _equal_weights(rows, 0.25).isnan().any(), "its row is not read"


@pytest.mark.parametrize("norm_eps", [1e-5, 0.5])
def test_rows_that_reach_the_bound(norm_eps: float) -> None:
    """Parallel rows of the threshold's weight, placed so that both mixes are equally long.

    The mix without them is 1 everywhere; together they change it by -2 in the even places.
    """
    hidden, skipped, kept = 64, 2, 4.0
    even = torch.arange(hidden) % 2 == 0
    left_out = torch.where(even, -4.0, 0.0)
    rows = torch.stack([left_out, left_out, torch.zeros(hidden), torch.full((hidden,), kept)])
    rows = rows.to(DEVICE)
    full = _equal_weights(rows, 0.0, norm_eps)
    without = _equal_weights(rows, 0.25, norm_eps)
    change = (full - without).square().mean().sqrt()

    largest = left_out.square().mean().sqrt().double().to(DEVICE)
    root = (1.0 + norm_eps) ** 0.5  # of both mixes
    bound = 2 * (skipped * 0.25 * largest) / (root + root)
    torch.testing.assert_close(change, bound, rtol=2**-22, atol=0.0)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 12),
    hidden=st.sampled_from((3, 64, 257)),
    spread=st.sampled_from((0.1, 1.0, 3.0)),
    sizes=st.sampled_from((0.0, 1.0, 3.0)),
    skip_below=st.sampled_from((1e-6, 1e-3, 0.05, 0.3, 0.9)),
    seed=st.integers(0, 2**31),
)
def test_the_bound_holds(count, hidden, spread, sizes, skip_below, seed) -> None:
    """Any scores and sizes of rows: the result moves by no more than the docstring says."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count + 1, hidden, generator=generator)
    rows *= torch.exp(sizes * torch.randn(count + 1, 1, generator=generator))
    scores = (spread * torch.randn(1, 1, count + 1, generator=generator)).to(DEVICE)
    rows = rows.to(DEVICE)
    results = [
        mix_scored(
            *(rows[-1:].clone(), rows[None].clone(), scores, floats(hidden)),
            torch.ones(hidden, device=DEVICE),
            **{"row": count, "position": 0, "fresh": True},
            bias=scores[0, 0, -1:].clone(),  # the query is zero: all of the last row's logit
            skip_below=threshold,
            **EPS,
        )[0].double()
        for threshold in (0.0, skip_below)
    ]
    weights = torch.softmax(scores[0, 0].double(), -1)
    skipped = weights[:-1] <= skip_below
    assume(((weights[:-1] / skip_below - 1).abs() > 1e-5).all())  # else a rounding decides
    sizes_of = rows[:-1].double().square().mean(-1).sqrt()
    cost = (weights[:-1] * sizes_of)[skipped].sum()
    assert cost <= skip_below * int(skipped.sum()) * sizes_of.max()
    full = weights @ rows.double()
    left = full - (weights[:-1, None] * rows[:-1].double())[skipped].sum(0)
    roots = [(mix.square().mean() + NORM_EPS).sqrt() for mix in (full, left)]
    rounding = sum(ROUNDINGS * 2**-24 * (1 + 4 * spread) * rows.abs().max() / r for r in roots)
    change = (results[0] - results[1]).square().mean().sqrt()
    assert change <= 2 * cost / sum(roots) + rounding


def test_rows_without_weight_are_not_read_by_default() -> None:
    """A weight that is zero in float32 leaves its row out; the result is that of the other rows."""
    arguments = _arguments()
    arguments["scores"][:, 1, 1] = -200.0
    expected = mix_scored(**arguments)
    arguments["bank"] = _arguments()["bank"]
    arguments["bank"][:, 1] = torch.nan
    assert torch.equal(mix_scored(**arguments), expected)


# NumPy, by which Triton is interpreted, warns of what the test puts there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_row_that_is_not_finite_is_not_hidden() -> None:
    """Its logit is NaN, and so is the result, though no comparison with NaN reads a row."""
    arguments = _arguments()
    for poison_ in (torch.nan, torch.inf):
        arguments["bank"] = _arguments()["bank"]
        arguments["bank"][2, 1, 5] = poison_
        what = {"first": 0, "count": 3, "key_eps": KEY_EPS}
        score_rows(arguments["bank"], torch.ones(3, 96).to(DEVICE), arguments["scores"], **what)
        out = mix_scored(**arguments)
        assert out[2].isnan().all() and not out[:2].isnan().any()


# Sites in order


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [1, 3], ids=["full", "blocks of three"])
def test_sites_in_order(block: int, dtype: torch.dtype) -> None:
    """A model's depth: every row scored once, for the sites left; exact state throughout."""
    depth = 9
    case = Case(count=1, sites=depth, spare=1 + depth // block, dtype=dtype, scale=3.0)
    inputs = make_inputs(case)
    scores = _scores(case, inputs.bank.shape[1])
    finished, partial, scored = inputs.blocks(), None, 0
    for site, query in enumerate(inputs.queries):
        delta, fresh = inputs.vectors(), site % block == 0
        completes = (site + 1) % block == 0
        partial = reference.add_partial(None if fresh else partial, delta.clone())
        sources, row = [*finished, partial], len(finished)
        where = {"row": row, "fresh": fresh}
        if row > scored:
            rest = inputs.queries[site:], scores[:, site:]
            what = {"first": scored, "count": row - scored, "key_eps": KEY_EPS}
            score_rows(inputs.bank, *rest, **what)
            scored = row
        if completes:
            finished.append(partial)
        weights = query, inputs.norm_weight
        out = mix_scored(delta, inputs.bank, scores, *weights, position=site, **where, **EPS)
        assert torch.equal(bits(inputs.bank[:, : row + 1]), bits(torch.stack(sources, 1)))
        assert out.dtype == dtype and out.is_contiguous()
        mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
        expected = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS)
        error = gain(mixed, inputs.norm_weight) * mix_error(sources, query)
        close(out, expected, half_ulp(expected, dtype) + error)
        if fresh:  # the state of a single pass, bit for bit, and its result to rounding
            other = inputs.bank.clone()
            same = single_pass(delta, other, *weights, **where, **EPS)
            assert torch.equal(bits(other), bits(inputs.bank))
            torch.testing.assert_close(same, out, rtol=2**-6, atol=2**-7)


# Contracts


def _arguments(tokens: int = 4, **changes: object) -> dict[str, object]:
    """Valid arguments of ``mix_scored``, with changes."""
    generator = torch.Generator().manual_seed(1)
    bfloat16 = {"dtype": torch.bfloat16, "device": DEVICE}
    return (
        {
            "delta": torch.randn(tokens, 96, generator=generator).to(**bfloat16),
            "bank": torch.randn(tokens, 5, 96, generator=generator).to(**bfloat16),
            "scores": torch.randn(tokens, 3, 5, generator=generator).to(DEVICE),
            "query": torch.randn(96, generator=generator).to(DEVICE),
            "norm_weight": torch.randn(96, generator=generator).to(**bfloat16),
            "row": 3,
            "position": 1,
            "fresh": False,
        }
        | EPS
        | changes
    )


def _scoring(tokens: int = 4, **changes: object) -> dict[str, object]:
    """Valid arguments of ``score_rows``, with changes."""
    return {
        "bank": zeros(tokens, 5, 96),
        "queries": floats(9, 96),
        "scores": floats(tokens, 9, 5),
        "first": 1,
        "count": 2,
        "key_eps": KEY_EPS,
    } | changes


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring has programs for groups of sites, tokens and rows, but not too many."""
    scoring, mixing = Spy(), Spy()
    monkeypatch.setattr(score_rows_module, "score_kernel", scoring)
    monkeypatch.setattr(mix_scored_module, "mix_scored_kernel", mixing)
    score_rows(**_scoring(count=1))
    score_rows(**_scoring())
    score_rows(**_scoring(tokens=5000, count=1))
    score_rows(**_scoring(tokens=0))
    score_rows(**_scoring(queries=floats(0, 96), scores=floats(4, 0, 5)))
    # Three groups of four sites; 15000 programs would be 8 times 2048, so each takes 8 tokens.
    assert scoring.grids == [(12, 1), (12, 2), (3 * 625, 1)]
    mix_scored(**_arguments())
    assert mix_scored(**_arguments(tokens=0)).shape == (0, 96)
    assert mixing.grids == [(4,)]


REFUSALS = {
    "an integer bank": (
        lambda: score_rows(**_scoring(bank=zeros(4, 5, 96, dtype=torch.int8))),
        "bank is torch.int8",
    ),
    "queries in a half": (
        lambda: score_rows(**_scoring(queries=zeros(9, 96))),
        "queries is torch.bfloat16; it is folded",
    ),
    "one query": (
        lambda: score_rows(**_scoring(queries=floats(96))),
        r"queries must be \[sites, hidden\], not \[96\]",
    ),
    "scores of other sites": (
        lambda: score_rows(**_scoring(scores=floats(4, 8, 5))),
        r"scores \[4, 8, 5\] are not for 9 sites",
    ),
    "scores of other tokens": (
        lambda: score_rows(**_scoring(scores=floats(3, 9, 5))),
        r"scores must be \[4, sites, slots\] torch.float32, not \[3, 9, 5\]",
    ),
    "scores in a half": (
        lambda: score_rows(**_scoring(scores=zeros(4, 9, 5))),
        r"not \[4, 9, 5\] torch.bfloat16",
    ),
    "row behind the scores": (
        lambda: score_rows(**_scoring(scores=floats(4, 9, 2))),
        r"rows 1..2 are outside the 2 slots",
    ),
    "negative row": (
        lambda: score_rows(**_scoring(first=-1)),
        "rows -1..0 are outside the 5 slots",
    ),
    "strided queries": (
        lambda: score_rows(**_scoring(queries=floats(9, 192)[:, ::2])),
        "queries must have unit stride",
    ),
    "scores elsewhere": (
        lambda: score_rows(**_scoring(scores=torch.empty(4, 9, 5, device="meta"))),
        "scores is on meta",
    ),
    "expanded scores": (
        lambda: score_rows(**_scoring(scores=floats(1, 9, 5).expand(4, 9, 5))),
        "scores is written and its rows overlap",
    ),
    "a flat bank": (
        lambda: score_rows(**_scoring(bank=zeros(4, 96))),
        r"bank must be \[tokens, slots, hidden\], not \[4, 96\]",
    ),
    "no row": (lambda: score_rows(**_scoring(count=0)), "rows 1..0 are outside"),
    "too many rows": (lambda: score_rows(**_scoring(count=5)), "rows 1..5 are outside"),
    "mix: other tokens": (
        lambda: mix_scored(**_arguments(scores=floats(3, 3, 5))),
        r"scores must be \[4, sites, slots\]",
    ),
    "mix: no such row": (lambda: mix_scored(**_arguments(row=5)), "row 5 is outside the 5 slots"),
    "mix: no such site": (
        lambda: mix_scored(**_arguments(position=3)),
        "position 3 is outside the 3 sites of scores",
    ),
    "mix: no score of a row": (
        lambda: mix_scored(**_arguments(scores=floats(4, 3, 2))),
        "3 rows before row 3, but 2 slots of scores",
    ),
    "mix: negative threshold": (
        lambda: mix_scored(**_arguments(skip_below=-0.1)),
        "skip_below is -0.1, which is no weight from 0 to less than 1",
    ),
    "mix: every row left out": (
        lambda: mix_scored(**_arguments(skip_below=1.0)),
        "skip_below is 1.0, which is no weight",
    ),
    "mix: no number": (
        lambda: mix_scored(**_arguments(skip_below=float("nan"))),
        "skip_below is nan",
    ),
    "mix: query in a half": (
        lambda: mix_scored(**_arguments(query=zeros(96))),
        "query is torch.bfloat16; it is folded",
    ),
    "mix: expanded bank": (
        lambda: mix_scored(**_arguments(bank=zeros(1, 5, 96).expand(4, 5, 96))),
        "bank is written and its rows overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    call, sentence = REFUSALS[name]
    monkeypatch.setattr(score_rows_module, "score_kernel", None)
    monkeypatch.setattr(mix_scored_module, "mix_scored_kernel", None)
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_refuses_results_that_share_memory() -> None:
    """Writing a result must not change what another program still reads."""
    scores = floats(4, 9, 5)
    bank = scores.as_strided((4, 5, 1), (5, 1, 1))
    with pytest.raises(ValueError, match="scores must not share memory with bank"):
        score_rows(**_scoring(bank=bank, queries=floats(9, 1), scores=scores))
    arguments = _arguments()
    with pytest.raises(ValueError, match="out must not share memory with delta"):
        mix_scored(**arguments, out=arguments["delta"])


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_score_on_write_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
