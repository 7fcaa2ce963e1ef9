"""The figure of what the sites have learned: cosines between queries, and sizes by depth."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnres_serve.inspect import figure
from attnres_serve.inspect.queries import Queries

EMPTY: dict[str, Any] = {"facecolor": "white", "edgecolor": figure.FAINT, "hatch": "////"}


def write(model: str, found: Queries, path: Path) -> None:
    """Write the figure as its suffix says; the same numbers give the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    figure.save(lambda: draw(model, found), path)


def draw(model: str, found: Queries) -> Figure:
    """The figure."""
    sizes = [("length of the effective query", found.effective), ("key norm, rms", found.key_norm)]
    if found.bias is not None:
        sizes.append(("recency bias", found.bias))
    count = len(found.rows)
    height = min(max(5.2, 3 + 0.07 * count), 9)
    drawn = Figure(figsize=(height + 1 + 2 * len(sizes), height), layout="constrained")
    panels = drawn.subplots(
        1, 1 + len(sizes), sharey=True, width_ratios=(height, *[1.8] * len(sizes))
    )
    title = f"{figure.model_name(model)}: what the sites have learned"
    drawn.suptitle(title, fontsize=12, parse_math=False)
    image = panels[0].imshow(found.cosine, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="none")
    panels[0].patch.set(**EMPTY)
    panels[0].set_aspect("auto")
    panels[0].set_title("cosine between effective queries")
    panels[0].tick_params(length=0)
    panels[0].spines[:].set_visible(False)
    figure.label_layers(panels[0], found.rows)
    ticks = figure.layer_ticks(found.rows)
    panels[0].set_xticks(list(ticks), list(ticks.values()), rotation=90)
    panels[0].set_xlabel("layer")
    bar = drawn.colorbar(image, ax=panels[0], aspect=35, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    for axes, (name, values) in zip(panels[1:], sizes, strict=True):
        _draw_sizes(axes, found, values)
        axes.set_xlabel(name)
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for kind, (label, colour, marker) in figure.KINDS.items()
        if kind in {row.kind for row in found.rows}
    ]
    if np.isnan(found.cosine).any():
        handles.append(Patch(**EMPTY, label="none: a query of zeros, or no query"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return drawn


def _draw_sizes(axes: Axes, found: Queries, values: np.ndarray) -> None:
    """A profile by depth for each kind of site."""
    for kind, (_, colour, marker) in figure.KINDS.items():
        rows = [place for place, row in enumerate(found.rows) if row.kind == kind]
        axes.plot(values[rows], rows, color=colour, marker=marker, markersize=3, linewidth=1)
    axes.axvline(0, color=figure.FAINT, linestyle=":", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
