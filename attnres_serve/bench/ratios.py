"""Paired statistics: what is taken in one round is compared within that round."""

from collections.abc import Sequence
from math import exp, log
from statistics import fmean

import numpy as np


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of each time to the baseline's of the same round.

    Raises:
        ValueError: the rounds do not match, or a time is not positive.
    """
    if len(times) != len(baseline):
        raise ValueError(f"{len(times)} rounds against {len(baseline)} of the baseline")
    if min(*times, *baseline) <= 0:
        raise ValueError("a time is not positive: the machine is too busy to measure anything")
    return [time / base for time, base in zip(times, baseline, strict=True)]


def median_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the median."""
    drawn = np.random.default_rng(seed).choice(values, size=(resamples, len(values)))
    tails = (1 - level) / 2, (1 + level) / 2
    low, high = np.quantile(np.median(drawn, axis=1), tails)
    return float(low), float(high)


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))
