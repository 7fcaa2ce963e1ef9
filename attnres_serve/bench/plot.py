"""The document of a measurement as a picture: ratios with their intervals, and where time goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnres_serve.bench.breakdown import PARTS, SITES
from attnres_serve.bench.pictures import require_matplotlib as require_matplotlib
from attnres_serve.bench.workload import cell_of
from attnres_serve.errors import SettingError

COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#72b7b2", "#9ecae9", "#e45756", "#b279a2", "#eeca3b", "#bab0ac"),
        strict=True,
    )
)
CONTROL = "#8c8c8c"
SUFFIXES = (".png", ".svg")
WIDTH = 8.5  # inches
ROW = 0.42  # inches of a row
TIGHT = {"fontsize": "small", "handlelength": 1, "columnspacing": 1}
BUSY = "no ratio: the machine was too busy"
LONGEST_NAME = 60  # of a checkpoint, in letters


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
    panels = [_ratios_of(document), *([shares] if shares else [])]
    heights = [1 + ROW * len(rows) for rows in panels]
    figure = Figure(figsize=(WIDTH, 1 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    figure.suptitle(_title(document), fontsize="medium")
    _draw_ratios(axes[0], panels[0])
    if shares:
        _draw_shares(axes[1], shares)
        figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, **TIGHT)
    try:
        stem = path.with_suffix("") if path.suffix in SUFFIXES else path
        for suffix in SUFFIXES:
            figure.savefig(f"{stem}{suffix}", dpi=150)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None


def _title(document: Mapping[str, Any]) -> str:
    """The title, in lines that the picture has room for; a long name loses its middle."""
    config, name = document["config"], document["config"]["checkpoint"]
    if len(name) > LONGEST_NAME:
        half = LONGEST_NAME // 2
        name = f"{name[:half]}…{name[-half:]}"
    trial = "\na trial, no evidence" if document["quick"] else ""
    return (
        f"{name}\nAttnRes ({config['algorithm']}, {config['backend']}) against standard residuals, "
        f"{config['dtype']}, {'compiled' if config['compiled'] else 'eager'}{trial}"
    )


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


def _ratios_of(document: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """A label, a colour and what there is of a ratio, for every cell and its control."""
    found = []
    for row in document["cells"]:
        engines = row["engines"]
        found.append((_label(row), COLOURS[SITES], engines["attnres"]))
        if "control" in engines:
            found.append(("control", CONTROL, engines["control"]))
    return found


def _draw_ratios(axes: Any, rows: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    for place, (_, colour, one) in enumerate(rows):
        if "ratio" not in one:
            axes.text(
                0.5, place, BUSY, ha="center", va="center", transform=axes.get_yaxis_transform()
            )
            continue
        ratios(axes, [place], [one], color=colour)
        axes.annotate(
            f"{one['ratio']:.3f}",
            (one["ratio"], place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.margins(x=0.1)  # for the figures at its ends
    if not any("ratio" in one for _, _, one in rows):
        axes.set_xticks([])
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.set_xlabel("latency over the baseline's, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Any, shares: list[Mapping[str, Any]]) -> None:
    slowest: dict[str, float] = {}
    for row in shares:
        total = sum(row["milliseconds"].values())
        slowest[_label(row)] = max(total, slowest.get(_label(row), 0.0))
    left = [0.0] * len(shares)
    for part in PARTS:
        if not any(part in row["milliseconds"] for row in shares):
            continue
        widths = [row["milliseconds"].get(part, 0.0) / slowest[_label(row)] for row in shares]
        axes.barh(range(len(shares)), widths, left=left, color=COLOURS[part], label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shares)), (f"{_label(row)}: {row['engine']}" for row in shares))
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_xlabel("share of the slowest engine's time, under the profiler")
    axes.spines[["top", "right"]].set_visible(False)
