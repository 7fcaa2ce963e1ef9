"""The figures on file as the tables of the documentation, in Markdown.

    python -m benchmarks.published.tables                       those of benchmarks/results/

Nothing is measured here.  ``test_serving.py`` holds the documentation to these lines.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnres_serve.bench.breakdown import PARTS
from attnres_serve.bench.overhead import PHASES, told
from attnres_serve.bench.workload import cell_of
from attnres_serve.checkpoints.check import amount
from benchmarks.common import RESULTS


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def name_of(engine: str) -> str:
    return {"two_phase": "two-phase"}.get(engine, engine.replace("_", " "))


def ratios(result: Mapping[str, Any]) -> list[str]:
    """A row for each cell, then one for each phase: the baseline's time and the ratios to it."""
    baseline, *others = result["engines"]
    rows = []
    for row in result["cells"]:
        engines = row["engines"]
        typical = f"{1e3 * engines[baseline]['median_s']:.1f} ms"
        rows.append([label(row), typical, *(told(engines[name]) for name in others)])
    for phase in PHASES:
        found = (told(result["overhead"][name][phase]) for name in others)
        rows.append([f"{phase}, mean of its cells", "", *found])
    return table(["phase", name_of(baseline), *map(name_of, others)], rows)


def breakdown(result: Mapping[str, Any]) -> list[str]:
    """Milliseconds by part of the model, with the least and the most that a generation took.

    Documents up to procedure 4 have one generation, and no range.
    """
    shown = [part for part in PARTS if part in result["breakdown"][0]["milliseconds"]]
    rows = []
    for row in result["breakdown"]:
        ranges = row.get("range_milliseconds", {})
        cells = [label(row), name_of(row["engine"])]
        for part in shown:
            between = " ({:.1f} to {:.1f})".format(*ranges[part]) if ranges else ""
            cells.append(f"{row['milliseconds'][part]:.1f}{between}")
        rows.append([*cells, amount(row["site_bytes"]) if row["site_bytes"] else ""])
    return table(["milliseconds", "engine", *shown, "bytes of the sites"], rows)


def label(row: Mapping[str, Any]) -> str:
    """The cell; documents on file have one context."""
    cell = cell_of(row)
    return cell.label if cell.phase == "prefill" else f"decode, batch {cell.batch}"


def peers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each workload and peer, with its ratios to both references."""
    references = {"hf_open_attnres": "over `generate`, eager", "vllm": "over plain vLLM"}
    cells = []
    for row in rows:
        ratios = (told(row[f"over_{reference}"]) for reference in references)
        named = row["workload"], name_of(row["peer"])
        cells.append([*named, f"{row['median_s']:.2f}", f"{row['tokens_per_s']:.0f}", *ratios])
    return table(["workload", "peer", "seconds", "tokens/s", *references.values()], cells)


def course(points: Mapping[str, Any]) -> list[str]:
    """A row for each cell of every point; the share of the sites is that under the profiler."""
    rows = []
    for value, point in points.items():
        baseline, model = point["engines"]
        profiles = [row for row in point["breakdown"] if row["engine"] == model]
        for row, profile in zip(point["cells"], profiles, strict=True):
            engines, parts = row["engines"], profile["milliseconds"]
            typical = f"{1e3 * engines[baseline]['median_s']:.1f} ms"
            share = f"{parts['AttnRes'] / sum(parts.values()):.1%}"
            rows.append([value, cell_of(row).label, typical, told(engines[model]), share])
    return table(["", "cell", "baseline", "AttnRes", "sites"], rows)


def stacks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each shape: nanoseconds of a site and token, and the ratio within rounds."""
    cells = []
    for row in rows:
        shape = [str(row[key]) for key in ("hidden", "tokens", "blocks", "dtype")]
        times = [f"{row['nanoseconds'][name]['median']:.0f}" for name in row["nanoseconds"]]
        ratio = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"])
        cells.append([*shape, "cold" if row["cold"] else "warm", *times, ratio])
    head = ["d", "tokens", "blocks", "dtype", "caches", "single pass", "two-phase", "ratio"]
    return table(head, cells)


def anchors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was published of another kernel, and the model's time of it."""
    cells = [
        [
            f"{row['tokens']} tokens, {row['blocks']} blocks, {row['table']}s",
            f"{row['measured_us']:.2f}",
            f"{row['model_us']:.2f}",
            f"{row['model_us'] / row['measured_us'] - 1:+.1%}",
            f"{row['within']:.0%}",
        ]
        for row in rows
    ]
    return table(
        ["vLLM's kernel, d = 7168, H100", "measured us", "model us", "off", "held to"], cells
    )


def by_gpu(
    found: Mapping[str, Mapping[str, float]], at: Iterable[str], places: int = 2
) -> list[str]:
    """What is on file of each GPU, at each number of tokens."""
    return [" / ".join(f"{of[tokens]:.{places}f}" for of in found.values()) for tokens in at]


def blocks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two-phase over the single pass, H100 / H200."""
    cells = []
    for row in rows:
        ratios = row["over_single_pass"]["two_phase"]
        at = next(iter(ratios.values()))
        shown = by_gpu(ratios, at)
        cells.append([str(row["hidden"]), str(row["rows"]), str(row["sites"]), *shown])
    return table(["d", "n", "S", *(f"T = {tokens}" for tokens in at)], cells)


def changes(earlier: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two-phase over the single pass on eight rows before and after, H100 / H200."""
    cells = []
    for before, after in zip(earlier, now, strict=True):
        if before["rows"] != 8:
            continue
        shown = []
        for at in ("1", "8192"):
            for row in (before, after):
                shown += by_gpu(row["over_single_pass"]["two_phase"], [at])
        cells.append([str(after["hidden"]), str(after["sites"]), *shown])
    head = ["T = 1, before", "after", "T = 8192, before", "after"]
    return table(["d", "S", *head], cells)


def launches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Microseconds of a launch, H100 / H200."""
    cells = []
    for row in rows:
        found = row["microseconds"]
        at = next(iter(found.values()))
        shown = by_gpu(found, at, 1)
        named = row["kernel"], str(row["hidden"]), str(row["rows"]), str(row["sites"])
        cells.append([*named, *shown])
    return table(["launch", "d", "rows", "sites", *(f"T = {tokens}" for tokens in at)], cells)


def configs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Other configs of a launch over eight rows; the one in use has a star."""
    cells = []
    for row in rows:
        name = f"{', '.join(map(str, row['config'].values()))}{' *' if row['in_use'] else ''}"
        shown = by_gpu(row["microseconds"], ("1", "8192"), 1)
        sizes = str(row["registers"]), str(row["programs_per_sm"])
        named = row["kernel"], str(row["hidden"]), str(row["sites"])
        cells.append([*named, name, *sizes, *shown])
    head = ["launch", "d", "sites", "config", "registers", "programs on an SM"]
    return table([*head, "T = 1", "T = 8192"], cells)


def shapes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the sites of a model add to a step."""
    cells = []
    for row in rows:
        shown = (
            f"{row['added_us'][name]:.0f} us, {row['overhead'][name]:.2%}"
            for name in ("single_pass", "two_phase")
        )
        phase = f"{row['phase']}, {row['tokens']} token{'s' if row['tokens'] > 1 else ''}"
        cells.append([row["shape"], phase, row["gpu"], f"{row['step_us'] / 1000:.2f}", *shown])
    return table(["shape", "phase", "GPU", "step, ms", "single pass adds", "two-phase adds"], cells)


def plans(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two-phase over the single pass for whole models, H100 / H200."""
    cells = []
    for row in rows:
        ratios = row["over_single_pass"]
        at = next(iter(ratios.values()))
        shown = by_gpu(ratios, at)
        cells.append([str(row["hidden"]), f"{row['blocks']} of {row['sublayers']}", *shown])
    return table(["d", "blocks of sublayers", *(f"T = {tokens}" for tokens in at)], cells)


MODEL = {
    "blocks": blocks,
    "shapes": shapes,
    "plans": plans,
    "anchors": anchors,
    "configs": configs,
    "launches": launches,
}
MADE = {
    "latency": (ratios, breakdown),
    "trace_cost": (ratios,),
    "peers": (peers,),
    "scaling": (course,),
    "kernels.cpu_stack": (stacks,),
}


def of(document: Mapping[str, Any]) -> list[list[str]]:
    """The lines of every table of a document; none for those that have other figures."""
    if document["benchmark"] == "kernels.model":
        return [make(document[part]) for part, make in MODEL.items()]
    made = MADE.get(document["benchmark"], ())
    results = document["results"]
    each = results.values() if isinstance(results, dict) else [results]
    return [one(result) for one in made for result in each]


def main() -> int:
    """Print the tables of every document."""
    for path in sorted(RESULTS.glob("*.json")):
        for lines in of(json.loads(path.read_text())):
            print("\n".join([path.name, "", *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
