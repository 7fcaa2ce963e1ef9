"""The forms of the torch kernels, unrolled and stacked, against the reference in float64."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import (
    DTYPES,
    KEY_EPS,
    NORM_EPS,
    Case,
    check_mix,
    check_normed,
    every_row,
    mix_error,
)

from attnres_serve.kernels import reference
from attnres_serve.kernels.torch import functions as torch_functions

FORMS = {"unrolled": torch_functions._unrolled, "stacked": torch_functions._stacked}
every_form = pytest.mark.parametrize("form", FORMS)


@every_row
@every_form
def test_forms(case: Case, dtype: torch.dtype, form: str, unwritten: Callable[..., None]) -> None:
    """Each form, called directly, gives mixes and log-sum-exps of several queries at once."""
    sources, queries = case.sources(dtype), case.queries(3)
    unwritten(*sources, *queries)
    answers = FORMS[form](sources, queries, KEY_EPS)
    assert len(answers) == 3
    exact, log_sums = reference.phase_1(sources, torch.stack(queries), KEY_EPS, torch.float64)
    for (answer, log_sum), query, expected, wanted in zip(
        answers, queries, exact, log_sums, strict=True
    ):
        assert answer.shape == expected.shape and log_sum.shape == (case.tokens, 1)
        assert log_sum.dtype == torch.float32
        check_mix(answer, sources, query)
        if case.tokens:
            largest = torch.stack(sources, 1).double().abs().amax((1, 2))[:, None]
            allowed = mix_error(sources, query) / largest
            assert ((log_sum.double() - wanted[:, None]).abs() / allowed).max() <= 1


@every_form
@pytest.mark.parametrize("chosen", [0, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_dominating_score(form: str, chosen: int, dtype: torch.dtype) -> None:
    """A source along a long query takes the whole weight, and comes out unchanged."""
    case = Case(count=5, query_scale=0.0)
    sources = case.sources(dtype)
    direction = torch.randn(case.hidden, generator=torch.Generator().manual_seed(9))
    sources[chosen] = direction.to(dtype).expand(case.tokens, -1).contiguous()
    ((mixed, _),) = FORMS[form](sources, [40 * direction], KEY_EPS)
    torch.testing.assert_close(mixed, sources[chosen].float(), rtol=1e-6, atol=1e-6)


@every_form
def test_zero_query_is_the_mean(form: str) -> None:
    """Equal scores: the mix is the mean, whatever the sizes of the sources."""
    sources = [
        10.0**power * source for power, source in enumerate(Case(count=4).sources(DTYPES[0]))
    ]
    ((mixed, _),) = FORMS[form](sources, [torch.zeros(65)], KEY_EPS)
    torch.testing.assert_close(mixed, torch.stack(sources).mean(0), rtol=1e-5, atol=1e-4)


@every_form
@pytest.mark.parametrize("copies", [2, 3])
def test_a_recency_bias_of_log_n_is_n_copies_of_the_last_source(form: str, copies: int) -> None:
    """In the reference, in either form, and in the merge of two-phase."""
    *blocks, last = sources = Case(count=5).sources(torch.float32)
    (query,), bias = Case().queries(), torch.tensor([copies]).log()
    repeated = [*sources, *[last] * (copies - 1)]
    exact, _ = reference.mix(repeated, query, KEY_EPS, torch.float64)
    biased, weights = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    torch.testing.assert_close(biased, exact, rtol=1e-7, atol=1e-7)
    assert weights.shape == (5, 5)
    ((mixed, _),) = FORMS[form](sources, [query], KEY_EPS, bias)
    check_mix(mixed, repeated, query)
    weight = Case().norm_weight(torch.float32)
    ((answer, log_sum),) = FORMS[form](blocks, [query], KEY_EPS)
    for actual in (
        torch_functions.single_pass(sources, query, KEY_EPS, weight, NORM_EPS, bias),
        torch_functions.phase_2(answer, log_sum, [last], query, KEY_EPS, weight, NORM_EPS, bias),
    ):
        check_normed(actual, repeated, query, weight)
    (answers,), (log_sums,) = reference.phase_1(blocks, query[None], KEY_EPS, torch.float64)
    merged = reference.phase_2(answers, log_sums, last, query, KEY_EPS, bias)
    torch.testing.assert_close(merged, exact, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_mixing_is_nearer_than_mixing_in_the_activation_dtype(dtype: torch.dtype) -> None:
    """open-attnres' code rounds keys, scores, weights and mix; the exact mix is nearer to ours."""
    case = Case(tokens=64, count=9, hidden=256, query_scale=0.2)
    sources, (query,), bias = case.sources(dtype), case.queries(), torch.tensor([3.0])
    query = query.to(dtype)
    stacked = torch.stack(sources)
    wide = stacked.float()
    keys = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + KEY_EPS)).to(dtype)
    scores = torch.einsum("d, n t d -> n t", query, keys)
    scores[-1] += bias.to(dtype)
    theirs = torch.einsum("n t, n t d -> t d", scores.softmax(0), stacked)
    exact, _ = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    ((ours, _),) = torch_functions._stacked(sources, [query.float()], KEY_EPS, bias)
    errors = [(mixed.double() - exact).square().mean().sqrt() for mixed in (ours.to(dtype), theirs)]
    assert errors[0] < errors[1] < torch.finfo(dtype).eps  # both are roundings


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_rms_norm(dtype: torch.dtype, scale: float) -> None:
    """The norm alone rounds once, to the dtype asked for or to that of its input."""
    case = Case(tokens=7, count=1, scale=scale)
    (x,), weight = case.sources(dtype), case.norm_weight(dtype)
    exact = reference.rms_norm(x.double(), weight.double(), NORM_EPS)
    rounded = torch_functions.rms_norm(x, weight, NORM_EPS)
    assert rounded.dtype == dtype
    # Half a unit in the last place, subnormal numbers included, and a few float32 roundings.
    limits = torch.finfo(dtype)
    rtol, atol = limits.eps / 2 + 8 * 2**-24, limits.smallest_normal * limits.eps / 2 + 1e-12
    torch.testing.assert_close(rounded.double(), exact, rtol=rtol, atol=atol)
    wide = torch_functions.rms_norm(x, weight, NORM_EPS, torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=8 * 2**-24, atol=1e-12)


def test_a_weight_in_float32_is_not_rounded() -> None:
    """A float32 norm weight beside half activations keeps its bits."""
    (x,) = Case(count=1).sources(torch.bfloat16)
    weight = torch.full((65,), 1 + 2**-20)
    wide = torch_functions.rms_norm(x, weight, NORM_EPS, torch.float32)
    assert not torch.equal(
        wide, torch_functions.rms_norm(x, torch.ones(65), NORM_EPS, torch.float32)
    )


def refuse(*arguments: object) -> None:
    raise AssertionError("this form must not be used here")


def test_eager_mode_uses_the_stacked_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls on one tensor, however few the sources are."""
    monkeypatch.setattr(torch_functions, "_unrolled", refuse)
    case = Case()
    sources, (query,), weight = case.sources(DTYPES[0]), case.queries(), case.norm_weight(DTYPES[0])
    torch_functions.single_pass(sources, query, KEY_EPS, weight, NORM_EPS)
    torch_functions.phase_1(sources, [query], KEY_EPS)
