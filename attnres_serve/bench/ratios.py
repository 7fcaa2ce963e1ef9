"""Paired statistics: times of one turn are compared within that turn.

The ratio of a round has the noise of the machine, and all rounds of a start share a bias of its
processes: two processes of one model differ by a percent and more, because of the addresses of
their memory.  So a start gives one ratio, the median of its rounds, and the starts are the sample:
their mean on the log scale, with Student's interval.  One start has no interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, log10, sqrt
from statistics import fmean, median, stdev
from typing import Any

from attnres_serve.bench.workload import PHASES, Case
from attnres_serve.errors import SettingError

ONE_START = "one start has no interval: two starts of one model differ by a percent and more"
BIAS = 0.02  # approximate bias of a pair of processes; 1.1 to 3.7 % on the measured machines


@dataclass
class Samples:
    """The times of one engine in one case of one start, in seconds.

    Attributes:
        turns: for each round one figure for each turn: in prefill the time to the first token; in
            decode the median step of a slice, which ignores hiccups of the machine, divided by the
            tokens per sequence of a step of the round.
        times: every time to the first token of prefill, or every timed step of decode, which is
            the inter-token latency of its sequences.
    """

    turns: list[list[float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """The median turn of each round."""
        return [median(turns) for turns in self.turns]

    def ratios(self, baseline: "Samples") -> list[float]:
        """The median ratio of each round to the baseline's figure in the same turn."""
        pairs = zip(self.turns, baseline.turns, strict=True)
        return [median(paired_ratios(turns, others)) for turns, others in pairs]


Results = dict[Case, dict[str, Samples]]  # of one start, by case and engine


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of each time to the baseline's in the same turn.

    Raises:
        ValueError: the numbers of times differ.
        SettingError: a time is not positive.
    """
    if min(*times, *baseline) <= 0:
        raise SettingError("a time is not positive: the machine is too busy to measure anything.")
    return [time / base for time, base in zip(times, baseline, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the geometric mean of two or more positive values."""
    logs = [log(value) for value in values]
    reach = student(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - reach), exp(fmean(logs) + reach)


def student(freedom: int, probability: float = 0.95) -> float:
    """The quantile of the absolute value of Student's t for a probability."""
    import numpy as np  # takes a quarter of a second, which a refused command does not need

    angles = np.linspace(0, np.pi / 2, 10_001)
    density = np.cos(angles) ** (freedom - 1)  # of the angle whose tangent is t / sqrt(freedom)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(freedom) * float(np.tan(np.interp(probability, below / below[-1], angles)))


def summary(starts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The ratio and its interval from the ratios of every round of every start."""
    each = [median(rounds) for rounds in starts]
    if len(each) == 1:
        no_interval = {"ci95": None, "includes_1": None, "no_interval": ONE_START}
        return {"ratio": geometric_mean(starts[0]), **no_interval, "start_ratios": each}
    low, high = interval(each)
    return {
        "ratio": geometric_mean(each),
        "ci95": [low, high],
        "includes_1": low <= 1 <= high,
        "no_interval": None,
        "start_ratios": each,
    }


def overheads(results: Sequence[Results], name: str, baseline: str) -> dict[str, dict[str, Any]]:
    """A summary for each measured phase: in every round the geometric mean of its cases.

    The ratios of the cases in a round are averaged before the interval is computed, so that it
    includes their correlation.
    """
    by_phase: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        starts = []
        for start in results:
            cases = [engines for case, engines in start.items() if case.phase == phase]
            ratios = [engines[name].ratios(engines[baseline]) for engines in cases]
            starts.append([geometric_mean(one) for one in zip(*ratios, strict=True)])
        if starts[0]:
            by_phase[phase] = summary(starts)
    return by_phase


def ratio_text(summary: Mapping[str, Any], digits: int | None = None) -> str:
    """A ratio and its interval, by default with the significant decimals."""
    low, high = summary["ci95"] or [summary["ratio"]] * 2
    if digits is None:
        # Approximately, relative.
        reach = (high - low) / 2 / summary["ratio"] if summary["ci95"] else BIAS
        digits = max(1, min(3, ceil(-log10(reach)))) if reach > 0 else 3
    if not summary["ci95"]:
        return f"{summary['ratio']:.{digits}f} (one start)"
    return f"{summary['ratio']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
