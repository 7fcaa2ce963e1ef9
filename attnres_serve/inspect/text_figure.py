"""Figures of depth weights over whole texts: their spread, classes of tokens, and differences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from attnres_serve.inspect import figure
from attnres_serve.inspect.rows import SiteRow
from attnres_serve.inspect.statistics import ALL, Summary
from attnres_serve.inspect.token_classes import SPECIAL

NOTHING = "0.88"  # behind differences, where there is no such source
Tables = Sequence[tuple[str, np.ndarray]]  # titles, and numbers ``[S, N]``
Part = Figure | SubFigure
MOST_NAMED = 3  # panels beside each other that have room to say what sources are
LEAST = 1e-6  # a difference that has a colour, where there is none at all


def write(found: Summary, path: Path) -> None:
    """Write the figure of a text as its suffix says; the same numbers give the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    figure.save(lambda: draw(found), path)


def draw(found: Summary) -> Figure:
    """Quantiles and mean over all tokens, and below them what each class changes of the mean."""
    rows = found.rows
    drawn = Figure(figsize=(13, 2 * _height(rows)), layout="constrained")
    halves = drawn.add_gridspec(2, 1)
    above, below = drawn.add_subfigure(halves[0]), drawn.add_subfigure(halves[1])
    drawn.suptitle(
        f"{figure.model_name(found.model)}: attention over depth of {found.tokens[0]:,} tokens",
        fontsize=12,
        parse_math=False,
    )
    spread = [
        ("10 % of tokens are below", found.low[0]),
        ("mean", found.mean[0]),
        ("90 % of tokens are below", found.high[0]),
    ]
    _draw_weights(above, _panels(above, rows, 3), rows, spread)
    there = [name for name, tokens in zip(found.classes, found.tokens, strict=True) if tokens]
    # One special token a piece, which is unlike any other, would take the scale for itself.
    shown = [name for name in there if name not in (ALL, SPECIAL)] or [SPECIAL]
    changes = [
        (f"{name}\n{found.tokens[at]:,} tokens", found.mean[at] - found.mean[0])
        for at, name in enumerate(found.classes)
        if name in shown
    ]
    label = "mean of a class less that of all"
    _draw_differences(below, _panels(below, rows, len(changes)), rows, changes, label)
    _draw_legend(below, rows)
    return drawn


def write_difference(found: tuple[Summary, Summary], names: tuple[str, str], path: Path) -> None:
    """Write the figure of two texts or checkpoints, as ``write`` does.

    Args:
        found: of the two, which have the same sites and sources.
        names: what the panels call them.
        path: where to.

    Raises:
        OSError: it cannot be written.
    """
    figure.save(lambda: draw_difference(found, names), path)


def draw_difference(found: tuple[Summary, Summary], names: tuple[str, str]) -> Figure:
    """Both means over all tokens in the same colours, and beside them their difference."""
    first, second = found
    drawn = Figure(figsize=(13, _height(first.rows)), layout="constrained")
    drawn.suptitle("attention over depth, mean over tokens", fontsize=12)
    means = [
        (f"{name}\n{own.tokens[0]:,} tokens", own.mean[0])
        for name, own in zip(names, found, strict=True)
    ]
    change = [("second less first", second.mean[0] - first.mean[0])]
    panels = _panels(drawn, first.rows, 3)
    _draw_weights(drawn, panels[:2], first.rows, means)
    _draw_differences(drawn, panels[2:], first.rows, change, "difference of the means")
    _draw_legend(drawn, first.rows)
    return drawn


def _height(rows: Sequence[SiteRow]) -> float:
    return min(max(4.2, 2.4 + 0.07 * len(rows)), 8)


def _panels(part: Part, rows: Sequence[SiteRow], count: int) -> Sequence[Axes]:
    panels = part.subplots(1, count, sharey=True, squeeze=False)[0]
    figure.label_layers(panels[0], rows)
    return panels


def _draw_weights(
    part: Part, panels: Sequence[Axes], rows: Sequence[SiteRow], tables: Tables
) -> None:
    for axes, (title, table) in zip(panels, tables, strict=True):
        image = figure.heat_map(axes, rows, table)
        figure.frame_blocks(axes, rows)
        axes.set_title(title, parse_math=False)
    figure.weight_bar(part, image, panels[-1], table.shape[1])


def _draw_differences(
    part: Part, panels: Sequence[Axes], rows: Sequence[SiteRow], tables: Tables, label: str
) -> None:
    """All on one scale, whose middle is no difference."""
    most = max(LEAST, *(float(np.nanmax(np.abs(table))) for _, table in tables))
    for axes, (title, table) in zip(panels, tables, strict=True):
        image = figure.heat_map(axes, rows, table, cmap="RdBu_r", vmin=-most, vmax=most)
        axes.set_facecolor(NOTHING)
        figure.frame_blocks(axes, rows, figure.FAINT)
        axes.set_title(title, parse_math=False)
        if len(panels) > MOST_NAMED:
            axes.set_xlabel("source")
    bar = part.colorbar(image, ax=panels[-1], aspect=35, pad=0.02, format="%g")
    bar.set_label(label)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _draw_legend(part: Part, rows: Sequence[SiteRow]) -> None:
    handles: list[Any] = [
        Patch(color=colour, label=label)
        for kind, (label, colour, _) in figure.KINDS.items()
        if kind in {row.kind for row in rows}
    ]
    handles.append(Patch(color=NOTHING, label="no such source"))
    if figure.are_marked(rows):
        handles.append(Patch(facecolor="none", edgecolor="black", label="sum of the open block"))
    part.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
