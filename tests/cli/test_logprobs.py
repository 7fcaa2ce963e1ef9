"""A trainer's logprobs beside the engine's."""

import math
from typing import Any

import pytest
from on_file import Sentence

import attnres_serve

torch = pytest.importorskip("torch")


def test_equal_logprobs() -> None:
    found = attnres_serve.compare_logprobs([-1.0, -2.0], torch.tensor([-1.0, -2.0]))
    assert (found.tokens, found.mean, found.maximum, found.kl, found.outside) == (2, 0, 0, 0, 0)


def test_what_is_counted() -> None:
    """Ratios of 2, 1.19, 0.81 and 0.5: two of four are clipped."""
    ratios = [2.0, 1.19, 0.81, 0.5]
    engine = torch.tensor([-1.0] * 4, dtype=torch.float64)
    found = attnres_serve.compare_logprobs(engine + torch.tensor(ratios).double().log(), engine)
    logs = [math.log(ratio) for ratio in ratios]
    assert found.maximum == pytest.approx(math.log(2))
    assert found.mean == pytest.approx(sum(map(abs, logs)) / 4)
    assert found.kl == pytest.approx((sum(ratios) - 4 - sum(logs)) / 4)
    assert found.outside == 0.5


def test_the_estimate_is_the_divergence() -> None:
    """Of many tokens that the engine sampled, within five standard errors."""
    torch.manual_seed(3)
    engine, trainer = (torch.randn(50, dtype=torch.float64).log_softmax(0) for _ in range(2))
    sampled = torch.multinomial(engine.exp(), 100_000, replacement=True)
    found = attnres_serve.compare_logprobs(trainer[sampled], engine[sampled])
    each = (trainer - engine).exp() - 1 - (trainer - engine)
    error = (engine.exp() * (each - found.kl) ** 2).sum().sqrt() / math.sqrt(len(sampled))
    assert abs(found.kl - (engine.exp() * (engine - trainer)).sum()) < 5 * error


def test_gradients_and_bfloat16() -> None:
    trainer = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    assert attnres_serve.compare_logprobs(trainer, [-1, -2.5]).maximum == 0.5


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [([-1.0], [-1.0, -2.0]), ([], []), ([-math.inf], [-1.0]), ([-1.0], [math.nan])],
    ids=str,
)
def test_what_cannot_be_compared(trainer: Any, engine: Any, sentence: Sentence) -> None:
    sentence.raises(ValueError, attnres_serve.compare_logprobs, trainer, engine)
