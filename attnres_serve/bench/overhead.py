"""Overhead of an engine over the baseline: one ratio for each phase, with its interval."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from attnres_serve.bench.measure import Results
from attnres_serve.bench.ratios import geometric_mean, interval

PHASES = ("prefill", "decode")


def overheads(results: Sequence[Results], name: str, baseline: str) -> dict[str, dict[str, Any]]:
    """One ratio for each phase that was measured: in every round the geometric mean over its cells.

    The cells' ratios, which belong to one round, are averaged before the interval is taken, so that
    it knows what they have in common.
    """
    found = {}
    measured = {cell.phase for cell in results[0]}
    for phase in filter(measured.__contains__, PHASES):
        starts = []
        for start in results:
            ratios = [
                engines[name].ratios(engines[baseline])
                for cell, engines in start.items()
                if cell.phase == phase
            ]
            starts.append([geometric_mean(cells) for cells in zip(*ratios, strict=True)])
        found[phase] = ratio(starts)
    return found


def ratio(starts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Summary of the ratios of every round of every start."""
    each = [median(rounds) for rounds in starts]
    low, high = interval(starts)
    return {
        "ratio": geometric_mean(each),
        "ci95": [low, high],
        "includes_1": low <= 1 <= high,
        "start_ratios": each,
    }


def half_width(found: Mapping[str, Any]) -> float:
    """Half of the width of a ratio's interval, about, as a share of the ratio."""
    low, high = found["ci95"]
    return (high - low) / 2 / found["ratio"]


def widest(results: Sequence[Results], names: Sequence[str], baseline: str) -> float:
    """Half of the widest interval of some engines' overheads."""
    found = (overheads(results, name, baseline) for name in names)
    return max(half_width(phase) for phases in found for phase in phases.values())


def told(found: Mapping[str, Any], digits: int = 3) -> str:
    """A ratio and its interval with so many decimals."""
    low, high = found["ci95"]
    return f"{found['ratio']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
