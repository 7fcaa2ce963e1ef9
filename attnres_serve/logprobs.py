"""How far a trainer's logprobs are from the engine's, which reinforcement learning depends on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KEPT = 0.8, 1.2  # ratios of probabilities that a policy gradient with clipping keeps


@dataclass(frozen=True)
class Comparison:
    """Two sets of logprobs of the same tokens.

    Attributes:
        tokens: how many there are.
        mean: of |difference|, in nats.
        maximum: of |difference|, in nats.
        kl: estimate of KL(engine || trainer), in nats for a token; for tokens that the engine
            sampled at temperature 1.
        outside: share of tokens whose ratio, trainer to engine, leaves [0.8, 1.2].
    """

    tokens: int
    mean: float
    maximum: float
    kl: float
    outside: float


def compare_logprobs(trainer: Iterable[Any], engine: Iterable[Any]) -> Comparison:
    """Compare what a trainer's own forward pass gives with what the engine gave.

    Args:
        trainer: logprobs ``[tokens]`` in nats, of numbers, an array or a tensor.
        engine: those of the same tokens.

    Raises:
        ValueError: their numbers differ, there are none, or one is not finite.
    """
    import numpy as np

    own, other = (_numbers(name, x) for name, x in (("trainer", trainer), ("engine", engine)))
    if own.shape != other.shape or not own.size:
        raise ValueError(
            f"found {own.size} logprobs of the trainer and {other.size} of the engine; expected "
            "as many of each, at least one."
        )
    difference = own - other
    ratio = np.exp(difference)
    return Comparison(
        tokens=own.size,
        mean=float(abs(difference).mean()),
        maximum=float(abs(difference).max()),
        kl=float((ratio - 1 - difference).mean()),  # never negative, and of small variance
        outside=float(((ratio < KEPT[0]) | (ratio > KEPT[1])).mean()),
    )


def _numbers(name: str, found: Any) -> Any:
    import numpy as np

    if hasattr(found, "detach"):  # a tensor; NumPy has no bfloat16
        found = found.detach().cpu().double()
    numbers = np.asarray(found, dtype=np.float64).reshape(-1)
    if not np.isfinite(numbers).all():
        raise ValueError(f"a logprob of the {name} is not finite; compare sampled tokens alone.")
    return numbers
