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
    every_row,
    mix_error,
)

from attnres_serve.kernels import reference
from attnres_serve.kernels.torch import functions as torch_functions

FORMS = {"unrolled": torch_functions._unrolled, "stacked": torch_functions._stacked}


@every_row
@pytest.mark.parametrize("form", FORMS)
def test_forms(case: Case, dtype: torch.dtype, form: str, unwritten: Callable[..., None]) -> None:
    """Each form, called directly, gives mixes and log-sum-exps of several queries at once."""
    sources, queries, biases = case.sources(dtype), case.queries(3), case.biases(3, case.count)
    own = None if case.bias is None else biases
    unwritten(*sources, *queries, *(own or ()))
    answers = FORMS[form](sources, queries, KEY_EPS, own)
    assert len(answers) == 3
    stacked = torch.stack(queries), KEY_EPS, torch.float64, own and torch.stack(own)
    exact, log_sums = reference.phase_1(sources, *stacked)
    for (answer, log_sum), query, bias, expected, wanted in zip(
        answers, queries, biases, exact, log_sums, strict=True
    ):
        assert answer.shape == expected.shape and log_sum.shape == (case.tokens, 1)
        assert log_sum.dtype == torch.float32
        check_mix(answer, sources, query, bias)
        if case.tokens:
            largest = torch.stack(sources, 1).double().abs().amax((1, 2))[:, None]
            allowed = mix_error(sources, query, bias) / largest
            assert ((log_sum.double() - wanted[:, None]).abs() / allowed).max() <= 1


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


def test_eager_mode_uses_the_stacked_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls on one tensor, however few the sources are."""
    monkeypatch.delattr(torch_functions, "_unrolled")
    case = Case()
    sources, (query,), weight = case.sources(DTYPES[0]), case.queries(), case.norm_weight(DTYPES[0])
    torch_functions.single_pass(sources, query, KEY_EPS, weight, NORM_EPS)
    torch_functions.phase_1(sources, [query], KEY_EPS)
