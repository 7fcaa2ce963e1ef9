"""The latencies on file as a picture for the documentation.

    python -m benchmarks.published.figures                      into docs/images

A point is the ratio of a latency to the same model's with standard residuals, its bar the 95 %
interval, as in the documents of ``benchmarks/results/``; nothing is measured here.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from attnres_serve.bench.plot import ratios
from attnres_serve.bench.workload import cell_of
from benchmarks.common import RESULTS, ROOT
from benchmarks.published.tables import name_of

COLOURS = {
    "single_pass": "#e45756",
    "two_phase": "#4c78a8",
    "control": "#bab0ac",
}
TARGET = 1.02  # of the overhead on CPU
IMAGES = ROOT / "docs" / "images"


def latency(figure: Any) -> None:
    """Every shape on file, cell by cell; the control is a second baseline."""
    shapes = {
        name: result
        for path in sorted(RESULTS.glob("cpu-latency-*.json"), key=lambda path: len(path.name))
        for name, result in json.loads(path.read_text())["results"].items()
    }
    grid = figure.subplots((len(shapes) + 1) // 2, 2, squeeze=False).flat
    for axes in grid[len(shapes) :]:
        axes.remove()
    for axes, (shape, result) in zip(grid[: len(shapes)], shapes.items(), strict=True):
        cells = result["cells"]
        names = list(result["overhead"])
        for turn, name in enumerate(names):
            places = [row + 0.22 * (turn - (len(names) - 1) / 2) for row in range(len(cells))]
            found = [cell["engines"][name] for cell in cells]
            ratios(axes, places, found, color=COLOURS[name], label=name_of(name))
        axes.set_yticks(range(len(cells)), [cell_of(cell).label for cell in cells])
        axes.invert_yaxis()
        blocks = 2 * result["shape"]["layers"] // result["shape"]["block_size"]
        axes.set_title(f"{shape}, {blocks} blocks")
        axes.set_xlabel("latency / standard residuals")
        axes.axvline(TARGET, color="black", linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        named |= zip(names, handles, strict=True)
    figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False)


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture as PNG."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args(arguments)
    figure = Figure(figsize=(11, 7), layout="constrained")
    latency(figure)
    figure.savefig(options.out / "latency.png", dpi=130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
