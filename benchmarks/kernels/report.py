"""Rows of the document, the table and the plot, made of the times."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from attnres_serve.bench.ratios import paired_ratios
from benchmarks.kernels.cells import Cell
from benchmarks.kernels.contenders import BASELINE, Contender, algorithm_bytes

AGAINST = (BASELINE, "single_pass")


def summarise(
    cell: Cell,
    samples: dict[str, list[list[float]]],
    contenders: dict[str, Contender],
    errors: dict[str, float],
    dtype: torch.dtype,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """The rows of a cell.

    Args:
        cell: the shape.
        samples: microseconds of every site, by contender and round.
        contenders: what they are, by name.
        errors: what the gate found.
        dtype: of the activations.
        bandwidth: bytes a second of a copy.

    Returns:
        Per contender the microseconds of the block and of a site (the block's by the number of
        sites; the first; the later ones but the second, which begins the partial sum), the bytes
        of its algorithm, the microseconds in which a copy moves as many, and the medians of the
        ratios within a round.
    """
    blocks = {name: [sum(times) for times in rounds] for name, rounds in samples.items()}
    rows = []
    for name, rounds in samples.items():
        moved = algorithm_bytes(contenders[name].algorithm, cell, dtype)
        floor = 1e6 * moved / bandwidth
        spread = quartiles(blocks[name])
        row = {**cell._asdict(), "contender": name, "rounds": len(rounds)}
        row |= {"block_us": spread, "site_us": spread["median"] / cell.sites}
        row |= {"first_us": median(times[0] for times in rounds)}
        later = [median(times[2:]) for times in rounds if len(times) > 2]
        row |= {"later_us": median(later) if later else None}
        row |= {"bytes": moved, "floor_us": floor, "floor_share": floor / spread["median"]}
        row["ratios"] = {
            other: median(paired_ratios(blocks[name], blocks[other]))
            for other in AGAINST
            if other in samples and other != name
        }
        rows.append(row | {"gate": errors[name], "block_us_rounds": blocks[name]})
    return rows


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of one value, that value."""
    low, middle, high = (
        quantiles(values, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    )
    return {"median": middle, "q1": low, "q3": high}


HEAD = (
    f"{'T':>6}{'n':>3}{'d':>6}{'S':>4}  {'contender':19}{'block us':>11} {'quartiles':>21}"
    f"{'site us':>10}{'floor us':>10}{'of copy':>9}{'/add+norm':>10}{'/single':>9}"
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a person."""
    return "\n".join([HEAD, *map(line, rows)])


def line(row: dict[str, Any]) -> str:
    spread = row["block_us"]
    shape = f"{row['tokens']:>6}{row['blocks']:>3}{row['hidden']:>6}{row['sites']:>4}"
    text = f"{shape}  {row['contender']:19}{spread['median']:11.1f} "
    text += f"{spread['q1']:10.1f}{spread['q3']:11.1f}{row['site_us']:10.2f}"
    text += f"{row['floor_us']:10.1f}{row['floor_share']:9.0%}"
    for other, width in zip(AGAINST, (10, 9), strict=True):
        ratio = row["ratios"].get(other)
        text += f"{ratio:{width}.2f}" if ratio is not None else " " * width
    return text.rstrip()


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Microseconds of a site against tokens, a panel for each d and n, at the S with most rows.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sites = [row["sites"] for row in rows]
    sites_shown = max(set(sites), key=lambda one: (sites.count(one), one))
    shown = [row for row in rows if row["sites"] == sites_shown]
    widths = sorted({row["hidden"] for row in shown})
    depths = sorted({row["blocks"] for row in shown})
    size = 3.2 * len(depths), 2.6 * len(widths)
    figure, axes = pyplot.subplots(
        len(widths), len(depths), figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    names = list(dict.fromkeys(row["contender"] for row in shown))
    for hidden, row_of_axes in zip(widths, axes, strict=True):
        for blocks, axis in zip(depths, row_of_axes, strict=True):
            axis.set(xscale="log", yscale="log", title=f"d = {hidden}, n = {blocks}")
            for index, name in enumerate(names):
                points = sorted(
                    (row["tokens"], row["site_us"])
                    for row in shown
                    if (row["hidden"], row["blocks"], row["contender"]) == (hidden, blocks, name)
                )
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", ms=3, color=f"C{index}", label=name)
    handles = {
        label: handle
        for axis in figure.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    figure.supylabel("us per site")
    figure.suptitle(f"{title}, S = {sites_shown}, L2 cold")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
