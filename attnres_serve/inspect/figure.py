"""The figure of a trace.

Four panels share the depth of the model as their vertical axis: what every site reads, for one
token and on average, how large its newest source is, and how evenly it reads.  A column of the heat
maps is a source.  The open block, of which there is a running sum only, stands in the column of the
block that it becomes, so a site's sources fill a row from the left, and what does not exist yet is
left empty.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from attnres_serve.depth.sites import PARTIAL
from attnres_serve.inspect.answer import Trace

# Of Okabe and Ito's colours, which are told apart in every kind of colour blindness.
KINDS = {
    "attention": ("attention", "#0072b2", "o"),
    "mlp": ("MLP", "#d55e00", "s"),
    "mixer": ("sublayer", "#009e73", "v"),  # where a layer has one alone
    "final": ("final norm", "black", "D"),
}
NEUTRAL, FAINT, BAND = "0.35", "0.6", "0.955"
FINISHED = "^"  # how a finished block is marked
# Whatever the user's own settings are; no hash of the moment in an SVG.
STYLE: list[Any] = ["default", {"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "attnres"}]
STYLE.append({"svg.fonttype": "none", "pdf.fonttype": 42})  # text stays text
WIDTH = 13.0  # inches
PERCENTILES = (10, 90)  # of the tokens, between which most are
NARROW = 8.0  # inches, below which the panels have room in two rows only
SMALL = {"font.size": 6, "axes.titlesize": 6}  # type of a narrow figure
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # between labels
MOST_LAYERS, MOST_SOURCES, MOST_BLOCKS = 26, 12, 24  # that are labelled or marked one by one
FEW_SOURCES = 32  # for which a square root shows small weights
FEW_SITES = 40  # that have room for larger markers


class Row(Protocol):
    """A site, as far as a row of a panel needs it."""

    @property
    def layer(self) -> int | None: ...

    @property
    def kind(self) -> str: ...

    @property
    def sources(self) -> list[str]: ...


def write(trace: Trace, token: int, path: Path, width: float = WIDTH) -> None:
    """Write the figure as its suffix says; the same trace gives the same bytes.

    Args:
        trace: of all sites that mix.
        token: position of a traced token.
        path: where to.
        width: in inches.

    Raises:
        OSError: it cannot be written.
    """
    save(lambda: draw(trace, token, width), path, {} if width >= NARROW else SMALL)


def has_all_sites(trace: Trace) -> bool:
    """True if none is left out before or between those of a trace, whose blocks would run on."""
    return [site.index for site in trace.sites] == [*range(len(trace.sites))]


def save(drawn: Callable[[], Figure], path: Path, changes: dict[str, Any] | None = None) -> None:
    """Draw a figure in our style, with ``changes`` of it, and write it, as ``write`` does."""
    moments: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with style.context([*STYLE, changes or {}]):
        drawn().savefig(path, dpi=160, metadata=moments.get(path.suffix.lower()))


def draw(trace: Trace, token: int, width: float = WIDTH) -> Figure:
    """The figure; arguments as of ``write``."""
    row = [one.position for one in trace.tokens].index(token)
    weights = [np.array(site.weights) for site in trace.sites]
    widest = max(part.shape[1] for part in weights)
    is_narrow = width < NARROW
    height = min(1.6 * width, 6) if is_narrow else min(max(5.2, 3 + 0.07 * len(weights)), 9)
    figure = Figure(figsize=(width, height), layout="constrained")
    heat = 2 + min(widest, 60) / 40
    beside: dict[str, Any] = {} if is_narrow else {"width_ratios": (heat, heat, 1.7, 1.7)}
    panels = figure.subplots(*((2, 2) if is_narrow else (1, 4)), sharey=True, **beside).ravel()
    title = f"{model_name(trace.model)}: attention over depth{', edited' if trace.edits else ''}"
    figure.suptitle(title, fontsize=8 if is_narrow else 12, parse_math=False)
    one = heat_map(panels[0], trace.sites, grid([part[row] for part in weights]))
    heat_map(panels[1], trace.sites, grid([part.mean(axis=0) for part in weights]))
    _draw_magnitudes(panels[2], trace, row)
    _draw_entropy(panels[3], trace, row)
    what = f"token {token}" if is_narrow else _token_title(trace, row)
    panels[0].set_title(what, parse_math=False)
    length = len(trace.tokens)
    panels[1].set_title(f"mean over {length} token{'s' * (length > 1)}")
    panels[2].set_title("magnitude")
    panels[3].set_title("entropy")
    weight_bar(figure, one, panels[1], widest)
    label_layers(panels[0], trace.sites)
    if is_narrow:
        label_layers(panels[2], trace.sites)
        panels[0].set_xlabel("")  # the one beside it says it
    _mark_blocks(panels, trace.sites)
    figure.legend(
        handles=_legend(trace.sites),
        loc="outside lower center",
        ncols=3 if is_narrow else 9,
        frameon=False,
        handlelength=1.5,
        columnspacing=1.5,
    )
    return figure


def weight_bar(figure: Figure | SubFigure, image: Any, axes: Axes, widest: int) -> None:
    """The colours of weights beside a panel.

    Args:
        figure: that has the panel.
        image: what ``heat_map`` gave.
        axes: the panel.
        widest: sources of the site that has most.
    """
    bar = figure.colorbar(image, ax=axes, aspect=35, pad=0.02, format="%g")
    bar.set_label(f"weight ({_root(widest)[1]} colour scale)")
    bar.set_ticks([0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1])
    bar.outline.set_visible(False)  # type: ignore[operator]


def grid(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as a table, NaN where there is no source."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def blocks(sites: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
    """The number of every block, and the first and last row of its sites."""
    numbered = enumerate(sum(name != PARTIAL for name in site.sources) for site in sites)
    for number, group in groupby(numbered, key=lambda item: item[1]):
        rows = [row for row, _ in group]
        yield number, rows[0], rows[-1]


def visible(text: str) -> str:
    """A token's text with its white space to be seen, and without glyphs that would be boxes."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    signs = {"\n": "⏎", "\t": "⇥", " ": "␣"}
    for sign in set(text) - set(signs):
        drawn = sign.isprintable() and font.get_char_index(ord(sign))
        signs[sign] = sign if drawn else ascii(sign)[1:-1]
    return "".join(signs[sign] for sign in text)


def model_name(model: str) -> str:
    """The last part of a path, as a title has it."""
    return Path(model).name or model


def _token_title(trace: Trace, row: int) -> str:
    """Which token, and what stands before it."""
    token = trace.tokens[row]
    title = f"token {token.position}"
    if token.text is None:
        return f"{title}, id {token.id}"
    title += f": “{_cut(visible(token.text), 24)}”"
    before = "".join(one.text or "" for one in trace.tokens[max(0, row - 24) : row])
    return f"{title}\nafter “{_cut(visible(before), 28)}”" if before else title


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"…{text[1 - longest :]}"


def _root(sources: int) -> tuple[int, str]:
    """Which root of a weight is its place in the colour map, fixed so that figures compare."""
    return (2, "square-root") if sources <= FEW_SOURCES else (3, "cube-root")


def _is_full(sites: Sequence[Row]) -> bool:
    """True if blocks are single sublayers, which need no marks of their own."""
    return sum(site.sources[-1] == PARTIAL for site in sites) <= 1


def heat_map(axes: Axes, sites: Sequence[Row], table: np.ndarray, **options: Any) -> Any:
    """Draw a number for each source of each site.

    Args:
        axes: the panel.
        sites: its rows.
        table: ``[S, N]``, NaN where a site has no such source.
        options: how ``imshow`` colours them; by default as weights.
    """
    options = options or {
        "cmap": "viridis",
        "norm": PowerNorm(1 / _root(table.shape[1])[0], vmin=0, vmax=1),
    }
    image = axes.imshow(table, aspect="auto", interpolation="none", **options)
    colours = [KINDS[site.kind][1] for site in sites]
    beside: dict[str, Any] = {
        "transform": axes.get_yaxis_transform(),
        "clip_on": False,
        "linewidth": 0,
    }
    axes.barh(range(len(table)), 0.022, left=-0.032, height=1, color=colours, **beside)
    sources = table.shape[1]
    axes.set_xlim(-0.5, sources - 0.5)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xticks(*source_ticks(sites, sources))
    what = "sublayers by layer" if _is_full(sites) else "blocks"
    axes.set_xlabel(f"source: embedding, {what}")
    axes.tick_params(length=0)
    axes.tick_params(axis="y", pad=12)
    axes.spines[:].set_visible(False)
    return image


def source_ticks(sites: Sequence[Row], sources: int) -> tuple[list[int], list[str]]:
    """Columns of a heat map and what they are called: numbers of blocks, or layers of a Full model.

    A Full model's block is the output of one sublayer, and its layer stands at the first of those.
    """
    if _is_full(sites):
        columns: dict[int, int] = {}
        for place, site in enumerate(sites):
            if site.layer is not None and site.layer not in columns.values():
                columns[place + 1] = site.layer
    else:
        columns = {column: column for column in range(1, sources)}
    step = next(step for step in STEPS if len(columns) / step <= MOST_SOURCES)
    far = {column: number for column, number in columns.items() if column > sources / 40}
    shown = {column: number for column, number in far.items() if number % step == 0}
    return [0, *shown], ["emb", *map(str, shown.values())]


def _draw_magnitudes(axes: Axes, trace: Trace, row: int) -> None:
    """The last source of every site: the sum of its block so far, or the block just finished."""
    sites = trace.sites
    newest = np.array([np.array(site.rms)[:, -1] for site in sites])
    if _is_full(sites):  # outputs of attention and MLP, which differ
        for kind, (_, colour, marker) in KINDS.items():
            rows = [place + 1 for place, site in enumerate(sites[:-1]) if site.kind == kind]
            if rows:
                _draw_profile(axes, rows, newest[rows], row, colour, marker)
        _draw_profile(axes, [0], newest[:1], row, NEUTRAL, FINISHED)
    else:
        starts = [first for _, first, _ in blocks(sites)]
        anew = [start + 1 for start in starts if sites[start].sources[-1] != PARTIAL]
        for begin, end in pairwise(sorted({0, *anew, len(sites)})):
            rows = list(range(begin, end))
            marks = [place for place, at in enumerate(rows) if at in starts]
            _draw_profile(axes, rows, newest[rows], row, NEUTRAL, FINISHED, marks)
    positive = newest[newest > 0]
    if positive.size and positive.max() > 30 * positive.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("rms of the newest source")


def _draw_entropy(axes: Axes, trace: Trace, row: int) -> None:
    entropy = np.array([site.entropy for site in trace.sites])
    for kind, (_, colour, marker) in KINDS.items():
        rows = [place for place, site in enumerate(trace.sites) if site.kind == kind]
        if rows:
            _draw_profile(axes, rows, entropy[rows], row, colour, marker)
    most = np.log([len(site.sources) for site in trace.sites])
    edges = np.arange(len(most) + 1) - 0.5
    dotted: dict[str, Any] = {"color": FAINT, "linestyle": ":", "linewidth": 1}
    axes.stairs(most, edges, orientation="horizontal", baseline=None, **dotted)
    axes.set_xlim(left=0)
    axes.set_xlabel("nats")


def _draw_profile(
    axes: Axes,
    rows: list[int],
    values: np.ndarray,
    row: int,
    colour: str,
    marker: str,
    marked: list[int] | None = None,
) -> None:
    """The mean over tokens by depth, where most of them are, and one token.

    Args:
        axes: the panel.
        rows: of sites.
        values: ``[rows, tokens]``.
        row: of the token.
        colour, marker: how to draw it.
        marked: the rows that get the marker, by their places in ``rows``; all of them by default.
    """
    point: dict[str, Any] = {"color": colour, "clip_on": False}
    point["markersize"] = 4 if axes.get_ylim()[0] < FEW_SITES else 2
    low, high = np.percentile(values, PERCENTILES, axis=1)
    axes.fill_betweenx(rows, low, high, color=colour, alpha=0.18, linewidth=0)
    mean = values.mean(axis=1)
    axes.plot(mean, rows, marker=marker, markevery=marked, linewidth=1, **point)
    axes.plot(values[:, row], rows, marker="x", linestyle="", markeredgewidth=0.8, **point)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def label_layers(axes: Axes, sites: Sequence[Row]) -> None:
    """Name the layers at the rows of their sites."""
    ticks = layer_ticks(sites)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylabel("layer")


def layer_ticks(sites: Sequence[Row]) -> dict[float, str]:
    """The names of some layers, and of the final site, by their places among the sites."""
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


def are_marked(sites: Sequence[Row]) -> bool:
    """True if blocks are more than single sublayers, and not too many to be told apart."""
    return not _is_full(sites) and len(list(blocks(sites))) <= MOST_BLOCKS


def _mark_blocks(panels: Sequence[Axes], sites: Sequence[Row]) -> None:
    for axes in panels[:2]:
        frame_blocks(axes, sites)
    if not are_marked(sites):
        return
    for number, first, last in blocks(sites):
        if number % 2:
            for axes in panels[2:]:
                axes.axhspan(first - 0.5, last + 0.5, color=BAND, linewidth=0, zorder=0)
        panels[3].text(
            1.02,
            (first + last) / 2,
            f"block {number}",
            transform=panels[3].get_yaxis_transform(),
            va="center",
            color=NEUTRAL,
            fontsize="small",
        )


def frame_blocks(axes: Axes, sites: Sequence[Row], line: str = "white") -> None:
    """Draw a line between the blocks of a heat map, and a frame around every open sum."""
    if not are_marked(sites):
        return
    for number, first, last in blocks(sites):
        is_open = [row for row in range(first, last + 1) if sites[row].sources[-1] == PARTIAL]
        if first:
            axes.plot([-0.5, number - 0.5], [first - 0.5] * 2, color=line, linewidth=1)
        if is_open:
            corner = number - 0.5, is_open[0] - 0.5
            edge: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.9, "clip_on": False}
            axes.add_patch(Rectangle(corner, 1, len(is_open), fill=False, **edge))


def _legend(sites: Sequence[Row]) -> list[Any]:
    kinds = {site.kind for site in sites}
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for kind, (label, colour, marker) in KINDS.items()
        if kind in kinds
    ]
    point: dict[str, Any] = {"color": NEUTRAL, "linestyle": "", "markersize": 4}
    handles += [
        Line2D([], [], color=NEUTRAL, label="mean over tokens"),
        Patch(color=NEUTRAL, alpha=0.3, linewidth=0, label="10 to 90 % of tokens"),
        Line2D([], [], marker="x", label="the token", **point),
        Line2D([], [], color=FAINT, linestyle=":", label="even weights"),
    ]
    finished = "embedding" if _is_full(sites) else "finished block"
    handles.append(Line2D([], [], marker=FINISHED, label=finished, **point))
    if are_marked(sites):
        handles.append(Patch(facecolor="none", edgecolor="black", label="sum of the open block"))
    return handles
