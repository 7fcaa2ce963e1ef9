"""The verdict of ``attnres-serve verify``, from numbers that are made up: every bound is one."""

from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres_serve.depth.layout import Layout
from attnres_serve.verify import compare
from attnres_serve.verify.command import table
from attnres_serve.verify.compare import (
    KL_BOUND,
    LOGPROB_BOUND,
    PART_BOUND,
    TIE,
    Passage,
    _error,
    _report,
    whole,
)

EXACT = {"the head": 0.0}  # the errors of parts


def wholes(tokens: int = 4, **changed: Tensor) -> list[dict[str, Tensor]]:
    """A passage that agrees in everything but what is changed."""
    agreed = {
        "gap": torch.zeros(tokens - 1, dtype=torch.float64),
        "kl": torch.zeros(tokens, dtype=torch.float64),
        "same": torch.ones(tokens, dtype=torch.bool),
        "clear": torch.ones(tokens, dtype=torch.bool),
    }
    return [agreed, agreed | changed]


def test_equal_results_hold() -> None:
    report = _report(wholes(), {"a site": PART_BOUND, "the head": 0.0})
    assert report.holds and not report.parts and report.greedy_agreement == 1
    assert report.tokens == 8
    assert (report.worst_part, report.worst_error) == ("a site", PART_BOUND)


def test_the_bounds() -> None:
    """Wide enough for float32, and a tenth of what bfloat16 costs, whose unit is 2^-9."""
    assert 1e-5 < PART_BOUND < 2**-9 / 10
    assert PART_BOUND < LOGPROB_BOUND <= TIE < 2**-8
    assert KL_BOUND < LOGPROB_BOUND


@pytest.mark.parametrize("error", [1.01 * PART_BOUND, nan])
def test_a_part_beyond_its_bound(error: float) -> None:
    report = _report(wholes(), {"a site": error, "the head": 0.0})
    assert not report.holds
    assert list(report.parts) == ["a site"] and report.worst_part == "a site"


def test_a_part_that_is_no_number_is_the_worst() -> None:
    assert _report(wholes(), {"a site": nan, "the head": 1.0}).worst_part == "a site"


@pytest.mark.parametrize(
    "changed",
    [
        {"gap": torch.tensor([0.0, 0.0, 1.01 * LOGPROB_BOUND])},
        {"kl": torch.tensor([0.0, 0.0, 1.01 * KL_BOUND, 0.0])},  # of one token among many
        {"same": torch.tensor([True, True, True, False])},
    ],
    ids=list,
)
def test_a_passage_beyond_its_bound(changed: dict[str, Tensor]) -> None:
    assert not _report(wholes(**changed), EXACT).holds


def test_a_tie_is_no_choice() -> None:
    last = torch.tensor([True, True, True, False])
    assert _report(wholes(same=last, clear=last), EXACT).holds


def test_without_clear_choices_there_is_no_agreement() -> None:
    """As of a model whose head is zero: no choice of its is clear."""
    none = torch.zeros(4, dtype=torch.bool)
    unclear = [one | {"clear": none} for one in wholes()]
    report = _report(unclear, EXACT)
    assert report.holds and report.greedy_agreement is None
    assert "greedy agreement    no choice was clear" in table(report)
    assert not _report([one | {"kl": one["kl"] + 1} for one in unclear], EXACT).holds


@pytest.mark.parametrize("errors", [(nan, 0.0), (0.0, nan), (0.0, 1.0, 0.0), (1.0, nan, 0.0)])
def test_the_worst_passage_counts(errors: tuple[float, ...], monkeypatch) -> None:
    """Wherever it stands; a NaN is worse than any number."""
    logits = torch.zeros((2, 3), dtype=torch.float64)
    found = [Passage([0, 1], Layout.of(1), [], [], logits) for _ in errors]
    rest = iter(errors)
    expected = logits.log_softmax(-1)
    model = SimpleNamespace(logprobs=lambda ids: expected)
    monkeypatch.setattr(compare, "part_errors", lambda *_: [("a site", next(rest))])
    monkeypatch.setattr(compare, "serve", lambda *_: found)
    report = compare.verify(Path(), model, [[0, 1]] * len(errors), {})
    assert not report.holds and [*report.parts] == ["a site"]
    assert str(report.worst_error) == ("nan" if any(map(isnan, errors)) else "1.0")


def test_the_error_of_a_part_is_that_of_its_worst_token() -> None:
    expected = torch.ones((3, 4), dtype=torch.float64)
    found = expected.clone()
    found[2] *= 1.5
    assert _error(found, expected) == pytest.approx(0.5)


def test_a_passage_is_compared_token_by_token() -> None:
    """The logprob of every next token, and the divergence and the choice at every token."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((3, 5), generator=generator, dtype=torch.float64)
    expected = logits.log_softmax(-1)
    same = whole(Passage([1, 4, 2], Layout.of(1), [], [], logits), expected)
    assert same["gap"].shape == (2,) and same["gap"].max() < 1e-12
    assert same["kl"].shape == (3,) and same["kl"].abs().max() < 1e-12
    assert same["same"].all()
    changed = logits.clone()
    changed[1, 2] += 1  # the token that comes third
    found = whole(Passage([1, 4, 2], Layout.of(1), [], [], changed), expected)
    wanted = (changed.log_softmax(-1) - expected)[1, 2].abs()
    assert found["gap"].tolist() == pytest.approx([0, wanted.item()])
    share = changed[1].softmax(-1)
    divergence = (expected[1].exp() * (expected[1] - share.log())).sum()
    assert found["kl"].tolist() == pytest.approx([0, divergence.item(), 0])


def test_a_choice_with_a_small_lead_is_a_tie() -> None:
    expected = torch.tensor([[0.0, 0.9 * TIE], [0.0, 1.1 * TIE]]).double().log_softmax(-1)
    found = whole(Passage([0, 1], Layout.of(1), [], [], expected), expected)
    assert found["clear"].tolist() == [False, True]
