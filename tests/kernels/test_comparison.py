"""The comparison before a backend serves: silent for the right one, and for nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import DTYPES

from attnres_serve.kernels import backends, comparison
from attnres_serve.kernels.comparison import ALGORITHMS, difference

CPU = torch.device("cpu")
FUNCTIONS = ("queries_of", "single_pass", "phase_1", "phase_2")


def own() -> Any:
    cpp = backends.load("cpp")
    return SimpleNamespace(**{name: getattr(cpp, name) for name in FUNCTIONS})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [33, 256, 4096, 7168])
def test_nothing_differs(hidden: int, dtype: torch.dtype) -> None:
    assert difference(own(), hidden, dtype, CPU) is None


@pytest.mark.parametrize("default", DTYPES, ids=str)
def test_other_defaults_change_nothing(default: torch.dtype) -> None:
    """vLLM makes a model, and chooses its backend, with those of the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            assert difference(own(), 64, default, CPU) is None
    finally:
        torch.set_default_dtype(before)


def off_by_a_sixteenth(function):
    return lambda *arguments: function(*arguments) * (1 + 1 / 16)


def of_another_token(function):
    return lambda *arguments: function(*arguments).roll(1, 0)


def without_a_number(function):
    def wrong(*arguments):
        found = function(*arguments)
        found[-1, -1] = torch.nan
        return found

    return wrong


def of_the_neighbours_query(function):
    return lambda sites: function([*sites[1:], sites[0]])


def with_a_partial_sum_that_is_not_rounded_once(function):
    def wrong(delta, bank, *arguments):
        found = function(delta, bank, *arguments)
        bank[0, 3] = torch.nextafter(bank[0, 3], torch.full_like(bank[0, 3], torch.inf))
        return found

    return wrong


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("single_pass", off_by_a_sixteenth, "a site by single pass of 64 values in float32 is off"),
        ("phase_2", of_another_token, "a site by two phase of 64 values"),
        ("phase_2", without_a_number, "a site by two phase of 64 values in float32 is off"),
        ("queries_of", of_the_neighbours_query, "a site by two phase"),
        ("phase_2", with_a_partial_sum_that_is_not_rounded_once, "a partial sum by two phase"),
    ],
)
def test_a_fault_is_named(name, fault, said) -> None:
    backend = own()
    setattr(backend, name, fault(getattr(backend, name)))
    found = difference(backend, 64, torch.float32, CPU)
    assert found is not None and said in found


def test_many_tokens_are_compared_where_they_differ(monkeypatch) -> None:
    monkeypatch.setattr(comparison, "runs_of", lambda *given: [("two_phase", 1), ("two_phase", 9)])
    assert difference(own(), 64, torch.float32, CPU) is None
    backend = own()
    right, many = backend.phase_1, comparison.TOKENS * 9

    def wrong(delta, *arguments):
        normed, answers = right(delta, *arguments)
        return normed * (1 + (len(delta) == many) / 16), answers

    backend.phase_1 = wrong
    found = difference(backend, 64, torch.float32, CPU)
    assert found is not None and f"by two phase of 64 values in float32 with {many} tokens" in found


def test_every_algorithm_is_compared() -> None:
    from attnres_serve.settings import ALGORITHMS as SERVED

    assert tuple(ALGORITHMS) == SERVED


def test_no_other_random_number_is_drawn() -> None:
    """Weights that are drawn, as for a measurement, stay those of the model without sites."""
    before = torch.get_rng_state()
    difference(own(), 64, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 1024, 1025, 2048, 2049, 4096, 16384])
def test_as_many_tokens_are_compared_as_have_kernels_of_their_own(
    hidden: int, dtype: torch.dtype
) -> None:
    """Each way that a group and a single pass are launched, once."""
    from attnres_serve.kernels.triton.phase_1 import by_product, turns_of
    from attnres_serve.kernels.triton.single_pass import FEW

    sites, rows = comparison.SITES, comparison.BLOCKS
    runs = comparison.runs_of(hidden, dtype, torch.device("cuda", 0))
    tokens = [(name, comparison.TOKENS * copies) for name, copies in runs]
    assert tokens[: len(ALGORITHMS)] == [(name, comparison.TOKENS) for name in ALGORITHMS]
    assert runs[: len(ALGORITHMS)] == comparison.runs_of(hidden, dtype, CPU)
    groups = [
        (by_product(count, rows, sites, hidden, dtype), turns_of(count, sites, hidden) > 1)
        for name, count in tokens
        if name == "two_phase"
    ]
    in_turn = [(False, True), (False, False)]
    assert groups == in_turn + [(True, False)] * (dtype == torch.bfloat16)
    assert [count > FEW for name, count in tokens if name == "single_pass"] == [False, True]
