"""Differences between a trainer's logprobs and the engine's, for reinforcement learning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KEPT = 0.8, 1.2  # ratios of probabilities that a clipped policy gradient keeps


@dataclass(frozen=True)
class Comparison:
    """Two sets of logprobs of the same tokens.

    Attributes:
        tokens: their number.
        mean: of |difference|, in nats.
        maximum: of |difference|, in nats.
        kl: estimate of KL(engine || trainer), in nats per token; for tokens that the engine
            sampled at temperature 1.
        outside: share of tokens whose ratio, trainer to engine, leaves [0.8, 1.2].
    """

    tokens: int
    mean: float
    maximum: float
    kl: float
    outside: float


def compare_logprobs(trainer: Iterable[Any], engine: Iterable[Any]) -> Comparison:
    """Compare the logprobs of a trainer's forward pass with the engine's.

    Args:
        trainer: logprobs ``[tokens]`` in nats, of numbers, an array or a tensor.
        engine: logprobs of the same tokens.

    Raises:
        ValueError: their numbers differ, there are none, or one is not finite.
    """
    import numpy as np

    trained, served = (_numbers(name, x) for name, x in (("trainer", trainer), ("engine", engine)))
    if trained.shape != served.shape or not trained.size:
        raise ValueError(
            f"found {trained.size} logprobs of the trainer and {served.size} of the engine; "
            "expected as many of each, at least one."
        )
    difference = trained - served
    ratio = np.exp(difference)
    return Comparison(
        tokens=trained.size,
        mean=float(abs(difference).mean()),
        maximum=float(abs(difference).max()),
        kl=float((ratio - 1 - difference).mean()),  # never negative, and of small variance
        outside=float(((ratio < KEPT[0]) | (ratio > KEPT[1])).mean()),
    )


def _numbers(name: str, values: Any) -> Any:
    import numpy as np

    if hasattr(values, "detach"):  # a tensor; NumPy has no bfloat16
        values = values.detach().cpu().double()
    numbers = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(numbers).all():
        raise ValueError(f"a logprob of the {name} is not finite; compare sampled tokens alone.")
    return numbers
