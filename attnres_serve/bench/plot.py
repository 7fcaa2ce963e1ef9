"""The document of a measurement as a picture: ratios with their intervals, and where time goes."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnres_serve.bench.breakdown import PARTS, SITES
from attnres_serve.bench.workload import cell_of
from attnres_serve.errors import SettingError

COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#72b7b2", "#9ecae9", "#e45756", "#b279a2", "#eeca3b", "#bab0ac"),
        strict=True,
    )
)
SUFFIXES = (".png", ".svg")


def require_matplotlib(flag: str) -> None:
    """Raise SettingError if it is not installed; ``flag`` is what asks for it."""
    if find_spec("matplotlib") is None:
        raise SettingError(
            f"{flag} needs matplotlib, which is not installed; install it, or attnres-serve with "
            "the extra plot."
        )


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture as .png and .svg.

    Args:
        document: of ``attnres-serve bench`` in engines (not over HTTP).
        path: where to; .png or .svg at its end is left aside.

    Raises:
        SettingError: the files cannot be written.
    """
    from matplotlib.figure import Figure

    shares = document["breakdown"]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    costs, times = figure.subplots(1, 2)
    config = document["config"]
    figure.suptitle(
        f"{config['checkpoint']}: AttnRes ({config['algorithm']}, {config['backend']}) against "
        f"standard residuals, {config['dtype']}, {'compiled' if config['compiled'] else 'eager'}"
        + (" (a trial, no evidence)" if document["quick"] else "")
    )
    _draw_ratios(costs, document)
    if shares:
        _draw_shares(times, shares)
    else:
        times.set_axis_off()
    try:
        stem = path.with_suffix("") if path.suffix in SUFFIXES else path
        for suffix in SUFFIXES:
            figure.savefig(f"{stem}{suffix}", dpi=150)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None


def _label(row: Mapping[str, Any]) -> str:
    return cell_of(row).label


def ratios(
    axes: Any, places: Sequence[float], found: Sequence[Mapping[str, Any]], **style: Any
) -> None:
    """Ratios with their intervals, a row for each, and a line at 1."""
    values = [one["ratio"] for one in found]
    reach = [
        [one["ratio"] - one["ci95"][0] for one in found],
        [one["ci95"][1] - one["ratio"] for one in found],
    ]
    axes.errorbar(values, places, xerr=reach, fmt="o", capsize=4, **style)
    axes.axvline(1, color="black", linewidth=0.8)


def _draw_ratios(axes: Any, document: Mapping[str, Any]) -> None:
    rows = document["cells"]
    found = [row["engines"]["attnres"] for row in rows]
    ratios(axes, range(len(rows)), found, color=COLOURS[SITES])
    for place, one in enumerate(found):
        ratio = one["ratio"]
        axes.annotate(f"{ratio:.3f}", (ratio, place), (0, 7), textcoords="offset points")
    axes.set_yticks(range(len(rows)), map(_label, rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("latency, AttnRes / baseline, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Any, shares: list[Mapping[str, Any]]) -> None:
    slowest: dict[str, float] = {}
    for row in shares:
        total = sum(row["milliseconds"].values())
        slowest[_label(row)] = max(total, slowest.get(_label(row), 0.0))
    for place, row in enumerate(shares):
        left = 0.0
        for part in PARTS:
            width = row["milliseconds"].get(part, 0.0) / slowest[_label(row)]
            axes.barh(place, width, left=left, color=COLOURS[part], height=0.8)
            left += width
    axes.set_yticks(range(len(shares)), (f"{_label(row)}: {row['engine']}" for row in shares))
    axes.invert_yaxis()
    axes.set_xlabel("share of the slower engine's time, under the profiler")
    shown = [part for part in PARTS if any(part in row["milliseconds"] for row in shares)]
    handles = [axes.barh(0, 0, color=COLOURS[part]) for part in shown]
    axes.legend(
        handles,
        shown,
        fontsize="small",
        ncols=len(shown),
        loc="upper center",
        bbox_to_anchor=(0.4, 1.1),
        frameon=False,
        handlelength=1,
        columnspacing=0.8,
    )
    axes.spines[["top", "right"]].set_visible(False)
