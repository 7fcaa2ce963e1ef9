"""The figure of magnitudes over depth: outputs of sublayers, and the mixes that they read."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnres_serve.inspect import figure
from attnres_serve.inspect.magnitudes import Magnitudes

FAR = 30  # times the least magnitude, from which on a panel is logarithmic


def write(model: str, tokens: int, found: Magnitudes, path: Path) -> None:
    """Write the figure as its suffix says; the same numbers give the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    figure.save(lambda: draw(model, tokens, found), path)


def draw(model: str, tokens: int, found: Magnitudes) -> Figure:
    """The figure of a text of so many tokens."""
    rows = found.rows
    height = min(max(5.2, 3 + 0.07 * len(rows)), 9)
    drawn = Figure(figsize=(9, height), layout="constrained")
    title = f"{figure.model_name(model)}: magnitudes over depth of {tokens:,} tokens"
    drawn.suptitle(title, fontsize=12, parse_math=False)
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, name, values in zip(
        panels,
        ("output of the sublayer", "mix that it reads"),
        (found.output, found.mix),
        strict=True,
    ):
        _draw_profiles(axes, found, values)
        axes.set_title(name)
        axes.set_xlabel("rms")
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.label_layers(panels[0], rows)
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for kind, (label, colour, marker) in figure.KINDS.items()
        if kind in {row.kind for row in rows}
    ]
    handles += [
        Line2D([], [], color=figure.NEUTRAL, label="mean over tokens"),
        Patch(color=figure.NEUTRAL, alpha=0.3, linewidth=0, label="10 to 90 % of tokens"),
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return drawn


def _draw_profiles(axes: Axes, found: Magnitudes, values: np.ndarray) -> None:
    """Mean and quantiles ``[3, S]`` by depth, for each kind of site."""
    for kind, (_, colour, marker) in figure.KINDS.items():
        rows = [place for place, row in enumerate(found.rows) if row.kind == kind]
        mean, low, high = values[:, rows]
        axes.fill_betweenx(rows, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(mean, rows, color=colour, marker=marker, markersize=3, linewidth=1)
    positive = values[values > 0]
    if positive.max() > FAR * positive.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    for number, first, last in figure.blocks(found.rows):
        if number % 2 and figure.are_marked(found.rows):
            axes.axhspan(first - 0.5, last + 0.5, color=figure.BAND, linewidth=0, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
