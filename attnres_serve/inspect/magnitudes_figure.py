"""The figure of magnitudes over depth: outputs of sublayers, and the mixes that they read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnres_serve.inspect import figure
from attnres_serve.inspect.magnitudes import Magnitudes
from attnres_serve.inspect.rows import SiteRow

FAR = 30  # times the least magnitude, from which on a panel is logarithmic
LINES: tuple[dict[str, Any], ...] = (  # of the first checkpoint and of the second
    {"linestyle": "-"},
    {"linestyle": (0, (4, 2)), "markerfacecolor": "white"},
)


class Side(NamedTuple):
    """A checkpoint.

    Attributes:
        model: its name.
        tokens: how many its text has.
        found: what was measured.
    """

    model: str
    tokens: int
    found: Magnitudes


def write(sides: Sequence[Side], path: Path) -> None:
    """Write the figure as its suffix says; the same numbers give the same bytes.

    Args:
        sides: a checkpoint, or two, of which the first gives the sites.
        path: where to.

    Raises:
        OSError: it cannot be written.
    """
    figure.save(lambda: draw(sides), path)


def draw(sides: Sequence[Side]) -> Figure:
    """The figure; arguments as of ``write``."""
    rows = sides[0].found.rows
    height = min(max(5.2, 3 + 0.07 * len(rows)), 9)
    drawn = Figure(figsize=(9, height), layout="constrained")
    names = _names(sides)
    tokens = " and ".join(dict.fromkeys(f"{side.tokens:,}" for side in sides))
    title = f"{' and '.join(names)}: magnitudes over depth of {tokens} tokens"
    drawn.suptitle(title, fontsize=12, parse_math=False)
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, name, values in zip(
        panels,
        ("output of the sublayer", "mix that it reads"),
        ([side.found.output for side in sides], [side.found.mix for side in sides]),
        strict=True,
    ):
        _draw_profiles(axes, rows, values)
        axes.set_title(name)
        axes.set_xlabel("rms")
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.label_layers(panels[0], rows)
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for kind, (label, colour, marker) in figure.KINDS.items()
        if kind in {row.kind for row in rows}
    ]
    means = ["mean over tokens"] if len(sides) == 1 else names
    handles += [
        Line2D([], [], color=figure.NEUTRAL, marker="o", markersize=3, label=label, **line)
        for label, line in zip(means, LINES, strict=False)
    ]
    handles.append(
        Patch(color=figure.NEUTRAL, alpha=0.3, linewidth=0, label="10 to 90 % of tokens")
    )
    legend = drawn.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return drawn


def _names(sides: Sequence[Side]) -> list[str]:
    """The last parts of the checkpoints' names, or the whole ones where those are the same."""
    short = [figure.model_name(side.model) for side in sides]
    return short if len({*short}) == len(sides) else [side.model for side in sides]


def _draw_profiles(axes: Axes, rows: list[SiteRow], sides: list[np.ndarray]) -> None:
    """Means and quantiles ``[3, S]`` of every checkpoint by depth, for each kind of site."""
    for kind, (_, colour, marker) in figure.KINDS.items():
        places = [place for place, row in enumerate(rows) if row.kind == kind]
        for values, line in zip(sides, LINES, strict=False):
            mean, low, high = values[:, places]
            axes.fill_betweenx(places, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(mean, places, color=colour, marker=marker, markersize=3, linewidth=1, **line)
    every = np.stack(sides)
    positive = every[every > 0]
    if positive.max() > FAR * positive.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    for number, first, last in figure.blocks(rows):
        if number % 2 and figure.are_marked(rows):
            axes.axhspan(first - 0.5, last + 0.5, color=figure.BAND, linewidth=0, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
