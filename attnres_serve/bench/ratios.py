"""Ratios of an engine's times to the baseline's, with confidence intervals.

Times are paired: a time is divided by the baseline's time in the same turn.  Two kinds of error
remain.  The noise of the machine differs from round to round.  A bias of the processes is the same
in all rounds of a start: two processes of one model differ by a percent and more, because of the
addresses of their memory.  Therefore each start gives one ratio, the median of its rounds, and
these ratios are the sample: their geometric mean is reported, with Student's interval on the log
scale.  A single start has no interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, log10, sqrt
from statistics import fmean, median, stdev
from typing import Any

from attnres_serve.bench.workload import PHASES, Case
from attnres_serve.errors import SettingError

ONE_START = "one start has no interval: two starts of one model differ by a percent and more"
# The approximate bias of a pair of processes; it was 1.1 to 3.7 % on the measured machines.
PROCESS_BIAS = 0.02


@dataclass
class Samples:
    """The times of one engine in one case of one start, in seconds.

    Attributes:
        turns: for each round, one time for each turn.  In prefill it is the time to the first
            token.  In decode it is the median time of a step in a slice, which ignores hiccups of
            the machine, divided by the tokens that a sequence gets in a step of this round.
        times: every time to the first token in prefill, or the time of every step in decode,
            which is the inter-token latency of the step's sequences.
    """

    turns: list[list[float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """The median over the turns of each round."""
        return [median(turns) for turns in self.turns]

    def ratios(self, baseline: "Samples") -> list[float]:
        """For each round, the median ratio of a turn to the same turn of the baseline."""
        paired_turns = zip(self.turns, baseline.turns, strict=True)
        return [median(paired_ratios(turns, base_turns)) for turns, base_turns in paired_turns]


# The samples of one start, by case and by the engine's name.
Results = dict[Case, dict[str, Samples]]


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of each time to the baseline's time in the same turn.

    Raises:
        ValueError: there are more times than times of the baseline, or fewer.
        SettingError: a time is not positive.
    """
    if min(*times, *baseline) <= 0:
        raise SettingError("a time is not positive: the machine is too busy to measure anything.")
    return [time / base_time for time, base_time in zip(times, baseline, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the geometric mean of two or more positive values."""
    logs = [log(value) for value in values]
    half_width = student_quantile(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - half_width), exp(fmean(logs) + half_width)


def student_quantile(degrees: int, probability: float = 0.95) -> float:
    """The quantile of the absolute value of Student's t, for some degrees of freedom."""
    import numpy as np  # takes a quarter of a second, which a refused command does not need

    # With tan(angle) = t / sqrt(degrees), the angle has this density, up to a factor.
    angles = np.linspace(0, np.pi / 2, 10_001)
    density = np.cos(angles) ** (degrees - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(probability, cumulative / cumulative[-1], angles)
    return sqrt(degrees) * float(np.tan(angle))


def ratio_summary(round_ratios: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The ratio and its interval, from the ratios of every start's rounds."""
    start_ratios = [median(ratios) for ratios in round_ratios]
    if len(start_ratios) == 1:
        no_interval = {"ci95": None, "includes_1": None, "no_interval": ONE_START}
        ratio = geometric_mean(round_ratios[0])
        return {"ratio": ratio, **no_interval, "start_ratios": start_ratios}
    low, high = interval(start_ratios)
    return {
        "ratio": geometric_mean(start_ratios),
        "ci95": [low, high],
        "includes_1": low <= 1 <= high,
        "no_interval": None,
        "start_ratios": start_ratios,
    }


def overheads(results: Sequence[Results], engine: str, baseline: str) -> dict[str, dict[str, Any]]:
    """The ratio of an engine to the baseline in each measured phase, over all cases of the phase.

    In every round, the geometric mean of the cases' ratios is taken before the interval is
    computed, so that the interval includes the correlation of the cases.

    Args:
        results: one for each start.
        engine: the name of the engine.
        baseline: the name of the baseline.
    """
    summary_of_phase: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        round_ratios = []
        for start in results:
            samples_of_cases = [samples for case, samples in start.items() if case.phase == phase]
            case_ratios = [
                samples[engine].ratios(samples[baseline]) for samples in samples_of_cases
            ]
            rounds = zip(*case_ratios, strict=True)
            round_ratios.append([geometric_mean(ratios) for ratios in rounds])
        if round_ratios[0]:
            summary_of_phase[phase] = ratio_summary(round_ratios)
    return summary_of_phase


def ratio_text(summary: Mapping[str, Any], digits: int | None = None) -> str:
    """A ratio and its interval, rounded by default to the decimals that it supports."""
    low, high = summary["ci95"] or [summary["ratio"]] * 2
    if digits is None:
        # Half the width of the interval, relative to the ratio.
        error = (high - low) / 2 / summary["ratio"] if summary["ci95"] else PROCESS_BIAS
        digits = max(1, min(3, ceil(-log10(error)))) if error > 0 else 3
    if not summary["ci95"]:
        return f"{summary['ratio']:.{digits}f} (one start)"
    return f"{summary['ratio']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
