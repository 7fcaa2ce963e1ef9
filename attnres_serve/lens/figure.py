"""Figures for a paper: the sources that the sites of a model read, and what the sites have learned.

A row is a site and a column is a source, or a site again.  The partial sum stands in the column of
the block that it becomes, so a site's sources fill a row from the left, and sources that do not
exist yet are empty.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from attnres_serve.depth.sites import PARTIAL, Site
from attnres_serve.tracing.answer import ReadingSite

# Colours of Okabe and Ito, which can be distinguished with every kind of colour blindness.
KINDS = {
    "attention": ("attention", "#0072b2", "o"),
    "mlp": ("MLP", "#d55e00", "s"),
    "mixer": ("sublayer", "#009e73", "v"),  # the only sublayer of a layer
    "final": ("final norm", "black", "D"),
}
FAINT = "0.6"
EMPTY: dict[str, Any] = {"facecolor": "white", "edgecolor": FAINT, "hatch": "////"}
# Independent of the user's settings.  Text stays text, and an SVG has no random hash.
STYLE: dict[str, Any] = {"svg.hashsalt": "attnres", "svg.fonttype": "none", "pdf.fonttype": 42}
WIDTH = 6.75  # inches, the width of the text of a page
NARROW = 5.0  # inches, below which the font is smaller
DPI = 200
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # between labels
MOST_LAYERS, MOST_BLOCKS = 26, 24  # limits up to which each one is labelled or marked
FEW_SOURCES = 32  # up to which a square-root scale shows small weights


Row = Site | ReadingSite
Panels = Mapping[str, Sequence[np.ndarray]]  # by their titles


def write(file: Path | IO[bytes], draw: Callable[[float], Figure], width: float = WIDTH) -> None:
    """Draw a figure in ``STYLE`` and write it in the format of the file's suffix, or as PNG.

    The same numbers give the same bytes.

    Args:
        file: the path or the stream to write to.
        draw: makes the figure for a width.
        width: in inches.

    Raises:
        OSError: the file cannot be written.
    """
    moments: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    suffix = file.suffix.lower() if isinstance(file, Path) else ".png"
    size = 8 if width >= NARROW else 6
    with style.context(["default", STYLE | {"font.size": size, "axes.titlesize": size}]):
        draw(width).savefig(file, format=suffix[1:], dpi=DPI, metadata=moments.get(suffix))


def weights(
    title: str, sites: Sequence[Row], panels: Panels, width: float = WIDTH, far: float = 0
) -> Figure:
    """The depth maps of a trace, such as those of one token and of the mean over tokens.

    Args:
        title: title of the figure.
        sites: all sites that mix, in order.
        panels: for each panel the weights of every site's sources.
        width: in inches.
        far: for increases of a loss instead of weights, the largest absolute value.
    """
    figure, axes = _panels(title, sites, width, [1] * len(panels))
    sources = max(len(site.sources) for site in sites)
    root, name = (2, "square-root") if sources <= FEW_SOURCES else (3, "cube-root")
    colours: dict[str, Any] = {"cmap": "viridis", "norm": PowerNorm(1 / root, vmin=0, vmax=1)}
    label = f"weight, of 1 ({name} scale)"
    ticks = np.array([0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1])
    if far:
        label, ticks = "nats per token", 10 ** np.floor(np.log10(far)) * np.array([-1, 0, 1])
        colours = {"cmap": "RdBu_r", "norm": SymLogNorm(far / 10, vmin=-far, vmax=far)}
    for panel, (heading, rows) in zip(axes, panels.items(), strict=True):
        table = np.full((len(sites), sources), np.nan)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        image = panel.imshow(table, aspect="auto", interpolation="none", **colours)
        kinds = [KINDS[site.kind][1] for site in sites]  # in a strip on the left
        beside: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "clip_on": False}
        left, wide = -0.016 * len(panels), 0.011 * len(panels)  # as parts of the panel
        panel.barh(range(len(sites)), wide, 1, left, color=kinds, linewidth=0, **beside)
        panel.tick_params(axis="y", pad=8)
        _mark_blocks(panel, sites)
        panel.set_title(_visible(heading), parse_math=False)
        panel.set_xlim(-0.5, sources - 0.5)
        panel.set_ylim(len(sites) - 0.5, -0.5)
        panel.set_xticks(*_source_ticks(sites, sources, 12 if width >= NARROW else 6))
        panel.set_xlabel("source, by layer" if _is_full(sites) else "source, by block")
    _colour_bar(figure, image, axes, label).set_ticks(ticks)
    handles = [Patch(color=colour, label=label) for label, colour, _ in _kinds(sites)]
    block = Patch(facecolor="none", edgecolor="black", label="partial sum")
    figure.legend(handles=[*handles, *[block] * _are_marked(sites)], **_below(width))
    return figure


def queries(
    title: str,
    sites: Sequence[Row],
    cosine: np.ndarray,
    sizes: Mapping[str, np.ndarray],
    width: float = WIDTH,
) -> Figure:
    """The parameters of the sites: cosines between their queries, and sizes by depth.

    Args:
        title: title of the figure.
        sites: all sites that mix, in order.
        cosine: ``[S, S]``, NaN where it is undefined.
        sizes: ``[S]`` by axis label.
        width: in inches.
    """
    figure, axes = _panels(title, sites, width, [6 if width >= NARROW else 3, *[2] * len(sizes)])
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
    image = axes[0].imshow(cosine, aspect="auto", interpolation="none", **colours)
    axes[0].patch.set(**EMPTY)
    axes[0].set_title("effective queries")
    axes[0].set_xticks(axes[0].get_yticks(), _layer_ticks(sites).values(), rotation=90)
    axes[0].set_xlabel("layer")
    _colour_bar(figure, image, axes[0], "cosine")
    for panel, (name, values) in zip(axes[1:], sizes.items(), strict=True):
        for kind, (_, colour, marker) in KINDS.items():
            rows = [place for place, site in enumerate(sites) if site.kind == kind]
            panel.plot(values[rows], rows, color=colour, marker=marker, markersize=3, linewidth=1)
        panel.axvline(0, color=FAINT, linestyle=":", linewidth=1)
        panel.spines["bottom"].set_visible(True)
        panel.tick_params(axis="x", length=3)
        panel.set_xlabel(name)
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for label, colour, marker in _kinds(sites)
    ]
    hatched = Patch(**EMPTY, label="none: a query of zeros, or no query")
    figure.legend(handles=[*handles, *[hatched] * bool(np.isnan(cosine).any())], **_below(width))
    return figure


def _panels(
    title: str, sites: Sequence[Row], width: float, shares: list[int]
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels of these shares of its width, and the layers on their left."""
    height = min(0.45 * width + 0.035 * len(sites), 1.2 * width + 0.5)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False, width_ratios=shares)[0]
    figure.suptitle(title, parse_math=False)
    ticks = _layer_ticks(sites)
    axes[0].set_yticks(list(ticks), list(ticks.values()))
    axes[0].set_ylabel("layer")
    for panel in axes:
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    return figure, axes


def _colour_bar(figure: Figure, image: Any, axes: Any, label: str) -> Any:
    bar = figure.colorbar(image, ax=axes, aspect=35, pad=0.02, format="%g", label=label)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return bar


def _below(width: float) -> dict[str, Any]:
    """The placement of a legend."""
    return {"loc": "outside lower center", "ncols": 4 if width >= NARROW else 2, "frameon": False}


def _kinds(sites: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Name, colour and marker of the kinds of these sites."""
    return [KINDS[kind] for kind in KINDS if kind in {site.kind for site in sites}]


def _visible(text: str) -> str:
    """The text with escapes for characters that the font lacks."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    return "".join(x if font.get_char_index(ord(x)) else ascii(x)[1:-1] for x in text)


def _is_full(sites: Sequence[Row]) -> bool:
    """Whether blocks are single sublayers, which are not marked."""
    return sum(site.sources[-1] == PARTIAL for site in sites) <= 1


def _source_ticks(sites: Sequence[Row], sources: int, most: int) -> tuple[list[int], list[str]]:
    """At most ``most`` columns, labelled with their block, or with their layer in a Full model.

    There a block is the output of one sublayer, and a layer's label stands at its first sublayer.
    """
    columns = {column: column for column in range(1, sources)}
    if _is_full(sites):
        columns = {}
        for place, site in enumerate(sites):
            if site.layer is not None and site.layer not in columns.values():
                columns[place + 1] = site.layer
    step = next(step for step in STEPS if len(columns) / step <= most)
    far = {column: number for column, number in columns.items() if column > sources / 40}
    shown = {column: number for column, number in far.items() if number % step == 0}
    return [0, *shown], ["emb", *map(str, shown.values())]


def _layer_ticks(sites: Sequence[Row]) -> dict[float, str]:
    """Labels of some layers and of the final site, by position among the sites."""
    places: dict[int, list[int]] = {}
    for place, site in enumerate(sites):
        if site.layer is not None:
            places.setdefault(site.layer, []).append(place)
    step = next(step for step in STEPS if len(places) / step <= MOST_LAYERS)
    ticks = {float(np.mean(places[layer])): str(layer) for layer in places if layer % step == 0}
    if sites[-1].kind == "final":
        last = len(sites) - 1
        ticks = {at: label for at, label in ticks.items() if last - at > 0.03 * last}
        ticks[last] = "final"
    return ticks


def _blocks(sites: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
    """For every block its number, and the first and last row of its sites."""
    numbered = enumerate(sum(name != PARTIAL for name in site.sources) for site in sites)
    for number, group in groupby(numbered, key=lambda item: item[1]):
        rows = [row for row, _ in group]
        yield number, rows[0], rows[-1]


def _are_marked(sites: Sequence[Row]) -> bool:
    """Whether blocks are marked: they have several sublayers, and are not too many."""
    return not _is_full(sites) and len(list(_blocks(sites))) <= MOST_BLOCKS


def _mark_blocks(axes: Axes, sites: Sequence[Row]) -> None:
    """Draw a line between blocks, and a frame around every partial sum."""
    for number, first, last in _blocks(sites) if _are_marked(sites) else ():
        is_open = [row for row in range(first, last + 1) if sites[row].sources[-1] == PARTIAL]
        if first:
            axes.plot(
                [-0.5, number - 0.5], [first - 0.5] * 2, color="white", linewidth=1, zorder=0.5
            )
        if is_open:
            corner = number - 0.5, is_open[0] - 0.5
            axes.add_patch(Rectangle(corner, 1, len(is_open), fill=False, clip_on=False))
