"""Paired statistics: what is taken in one round is compared within that round.

A round's ratio has the noise of the machine in it, and all rounds of a start have the luck of its
processes in common.  So a start gives one ratio, the median of its rounds, and the starts are the
sample: their mean on the log scale, with Student's interval.  A bootstrap of so few would be too
narrow.  The log of a ratio is the difference of two processes, so it scatters alike to both sides,
and Student's interval holds for such even if tails are heavy (``tests/bench/test_bench.py``).
"""

from collections.abc import Sequence
from functools import cache
from math import exp, log, sqrt
from statistics import fmean, median, stdev

import numpy as np

from attnres_serve.errors import SettingError


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of each time to the baseline's of the same round.

    Raises:
        ValueError: the rounds do not match.
        SettingError: a time is not positive.
    """
    if len(times) != len(baseline):
        raise ValueError(f"{len(times)} rounds against {len(baseline)} of the baseline")
    if min(*times, *baseline) <= 0:
        raise SettingError("a time is not positive: the machine is too busy to measure anything.")
    return [time / base for time, base in zip(times, baseline, strict=True)]


def interval(starts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of the geometric mean over starts of the median over rounds.

    Args:
        starts: the ratios of every round of every start; of a single one the interval is over its
            rounds, and does not know the luck of a process.
    """
    if len(starts) == 1:
        return median_interval(starts[0])
    return mean_interval([median(rounds) for rounds in starts])


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the geometric mean of two or more positive values."""
    logs = [log(value) for value in values]
    reach = student(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - reach), exp(fmean(logs) + reach)


@cache
def student(freedom: int) -> float:
    """The bound below which the absolute value of Student's t is with a probability of 95 %."""
    angles = np.linspace(0, np.pi / 2, 10_001)
    density = np.cos(angles) ** (freedom - 1)  # of the angle whose tangent is t / sqrt(freedom)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(freedom) * float(np.tan(np.interp(0.95, below / below[-1], angles)))


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
