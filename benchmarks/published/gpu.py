"""The tables of what was measured on a GPU: kernels, and decoders by code that is gone."""

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

from benchmarks.kernels.contenders import BASELINE
from benchmarks.published.markdown import table

Rows = Sequence[Mapping[str, Any]]
Cell = tuple[int, int, int, int]  # d, S, n, T

CONNECTIONS = {
    "single_pass": "single pass",
    "two_phase": "two-phase",
    "two_phase_late": "two-phase, none early",
}


def decoders(rows: Rows) -> list[str]:
    """A row for each shape and phase: the time with standard residuals, and ratios to it."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        tokens = f"batch {row['batch']}" if row["name"] == "decode" else f"{row['context']} tokens"
        at = cells.setdefault((row["shape"], f"{row['name']}, {tokens}"), [])
        if "ratio" in row:
            at.append("{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["ci95"]))
        else:
            at.append(f"{row['us']['median'] / 1000:.2f}")
    head = ["shape", "phase", "residuals, ms", *CONNECTIONS.values()]
    return table(head, [[*named, *found] for named, found in cells.items()])


def sites(rows: Rows) -> list[str]:
    """A row for each cell: microseconds of a block of sites, by contender."""
    names = ["single_pass", "two_phase", "vllm_kimi_k3", BASELINE]
    cells = []
    for (hidden, _, count, tokens), found in sorted(by_cell(rows).items()):
        us = {name: found[name]["block_us"]["median"] for name in names}
        moved = found["single_pass"]["bytes"]
        speed = f"{moved / us['single_pass'] / 1e6:.2f}" if tokens > 1 else ""
        theirs = us["vllm_kimi_k3"]
        ratios = [f"{us[name] / theirs:.2f}" for name in names[:2]]
        shown = [f"{us[name]:.0f}" for name in names]
        cells.append([str(hidden), str(count), str(tokens), *shown, speed, *ratios])
    head = ["d", "n", "T", "single pass", "two-phase", "vLLM's", "add + norm"]
    return table([*head, "single pass, TB/s", "/ vLLM's", "two-phase / vLLM's"], cells)


def by_cell(rows: Rows) -> dict[Cell, dict[str, Mapping[str, Any]]]:
    """Rows by cell and contender."""
    found: dict[Cell, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cell = row["hidden"], row["sites"], row["blocks"], row["tokens"]
        found.setdefault(cell, {})[row["contender"]] = row
    return found


HELD_UP = 1.2  # times the least round


def scatter(documents: Mapping[str, Rows]) -> list[str]:
    """How far the rounds of one time lie apart, over all times of each document."""
    cells = []
    for name, rows in documents.items():
        apart, held = [], 0
        for row in rows:
            rounds, us = row["block_us_rounds"], row["block_us"]
            apart.append((us["q3"] - us["q1"]) / us["median"])
            held += max(rounds) > HELD_UP * min(rounds)
        tenths = quantiles(apart, n=10, method="inclusive")
        shares = (f"{share:.1%}".replace("%", " %") for share in (tenths[4], tenths[8]))
        cells.append([name, str(len(rows)), *shares, str(held)])
    head = ["times of", "number", "quartiles apart, half of the times", "nine of ten"]
    return table([*head, f"with a round above {HELD_UP} times the least"], cells)


# Blocks of sublayers.
PLANS = ((12, 6), (8, 6), (6, 6), (12, 12), (8, 12), (6, 12), (4, 12), (8, 24), (6, 24), (4, 24))


def whole_models(rows: Rows) -> dict[tuple[int, tuple[int, int]], dict[int, float]]:
    """Two-phase over the single pass, all sites of a model but those of its first block.

    A block on another number of rows than was measured takes what lies on the line through the two
    nearest.  The first block's sites are single passes by both.  Of the rounds the least counts: in
    one cell something else held up most rounds of every contender for milliseconds.

    Returns:
        By hidden size and plan, ratios by number of tokens.
    """
    names = ("two_phase", "single_pass")
    times: dict[tuple[int, int, int], dict[str, dict[int, float]]] = {}
    for (hidden, size, count, tokens), found in by_cell(rows).items():
        of = times.setdefault((hidden, size, tokens), {name: {} for name in names})
        for name in names:
            of[name][count] = min(found[name]["block_us_rounds"])
    ratios: dict[tuple[int, tuple[int, int]], dict[int, float]] = {}
    for (hidden, size, tokens), of in times.items():
        for plan in PLANS:
            if plan[1] == size:
                counts = range(2, plan[0] + 1)
                two, one = (sum(_at(of[name], count) for count in counts) for name in names)
                ratios.setdefault((hidden, plan), {})[tokens] = two / one
    return ratios


def _at(times: Mapping[int, float], count: int) -> float:
    """On the line through the two numbers of rows that were measured beside this one."""
    known = sorted(times)
    after = next((at for at in known[1:] if at >= count), known[-1])
    before = known[known.index(after) - 1]
    slope = (times[after] - times[before]) / (after - before)
    return times[before] + slope * (count - before)


def plans(rows: Rows) -> list[str]:
    """Two-phase over the single pass, by hidden size and blocks."""
    found = whole_models(rows)
    at = sorted({tokens for of in found.values() for tokens in of})
    cells = [
        [str(hidden), f"{plan[0]} of {plan[1]}", *(f"{of[tokens]:.2f}" for tokens in at)]
        for (hidden, plan), of in sorted(found.items(), key=lambda item: item[0][0])
    ]
    return table(["d", "blocks of sublayers", *(f"T = {tokens}" for tokens in at)], cells)


class Edit(NamedTuple):
    """A config of the tables, the one before or instead, and which times show it."""

    what: str
    before: str
    after: str
    field: str
    hidden: int
    tokens: tuple[int, ...]
    sites: int = 8
    rows: int = 8


FEW = "single pass, 4 rows at once; 2 before"
EDITS = (
    Edit(FEW, "single_pass/site2x2", "single_pass", "block_us", 1024, (1, 128)),
    Edit(FEW, "single_pass/site2x8", "single_pass", "block_us", 4096, (1, 128)),
    Edit(
        *("single pass, 2 rows at once; 1 before", "single_pass/site1x8", "single_pass"),
        *("block_us", 7168, (1, 128)),
    ),
    *(
        Edit(
            *("single pass, 4 rows at once; 2 in use", "single_pass", f"single_pass/site4x{warps}"),
            *("block_us", hidden, (256, 512)),
        )
        for hidden, warps in ((1024, 4), (4096, 8))
    ),
    Edit(
        *("single pass, a row at once by 4 warps; 2 by 8 in use", "single_pass"),
        *("single_pass/site1x4", "block_us", 4096, (256, 512)),
    ),
    Edit(
        "a merge, 16 warps; 8 before", "two_phase/site1x8", "two_phase", "later_us", 7168, (1, 512)
    ),
    Edit(
        *("phase 1, turns side by side; one by one before", "two_phase/one_by_one"),
        *("two_phase/side_by_side", "first_us", 1024, (256, 512)),
    ),
    Edit(
        *("phase 1, turns side by side; one by one in use", "two_phase/one_by_one"),
        *("two_phase/side_by_side", "first_us", 4096, (256, 512)),
    ),
)
PRODUCTS = tuple(
    Edit(
        *("phase 1, logits by a product; by reductions else", "two_phase/one_by_one"),
        "two_phase/product" if size == 6 else "two_phase/product32x128x2",
        *("first_us", hidden, (1024, 8192), size, count),
    )
    for hidden in (1024, 4096, 7168)
    for size in (6, 24)
    for count in (3, 8)
) + tuple(
    Edit(
        *("phase 1, mixes by 4 warps; by one before", "two_phase/product"),
        *("two_phase/part8x1024x4", "first_us", 1024, (8192,), size, count),
    )
    for size in (6, 24)
    for count in (3, 8)
)


def edits(rows: Rows) -> list[str]:
    """What was changed in the tables of configs and what was not, as far as the rows show it."""
    found, cells = by_cell(rows), []
    for edit in EDITS + PRODUCTS:
        for tokens in edit.tokens:
            of = found.get((edit.hidden, edit.sites, edit.rows, tokens), {})
            if not {edit.before, edit.after} <= of.keys():
                continue
            before, after = (
                value["median"] if isinstance(value := of[name][edit.field], dict) else value
                for name in (edit.before, edit.after)
            )
            named = edit.what, *map(str, (edit.hidden, edit.sites, edit.rows, tokens))
            shown = f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}"
            cells.append([*named, *shown])
    return table(["what", "d", "S", "n", "T", "us, other", "us, this", "ratio"], cells)


def kernels(document: Mapping[str, Any]) -> list[list[str]]:
    """The table that a document of ``benchmarks.kernels`` is for."""
    rows = document["results"]
    if any("/" in name for name in document["contenders"]):  # other configs
        return [edits(rows)]
    return [plans(rows) if len({row["sites"] for row in rows}) > 1 else sites(rows)]
