"""The figures on file as tables in Markdown, for the page that ``published.page`` prints."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from attnres_serve.bench.ratios import ratio_text
from attnres_serve.bench.workload import PHASES, case_of
from benchmarks.kernels.contenders import BASELINE

Cell = tuple[int, int, int, int]  # d, S, n, T
# Of ``serving.load``, by the names of vLLM's client.
FIGURES = {"request_throughput": "requests/s"} | {
    f"p{percent}_{what}_ms": f"{what.upper()}, p{percent}"
    for what in ("ttft", "itl")
    for percent in (50, 99)
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown: the head, and a line for each row."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def ratio_of(summary: Mapping[str, Any]) -> str:
    return ratio_text(summary, digits=3)


def name_of(engine: str) -> str:
    return {"two_phase": "two-phase"}.get(engine, engine.replace("_", " "))


def ratios(result: Mapping[str, Any]) -> list[str]:
    """A row for each cell, then one for each phase: the baseline's time and the ratios to it."""
    baseline, *others = result["engines"]
    rows = []
    for row in result["cells"]:
        engines = row["engines"]
        typical = f"{1e3 * engines[baseline]['median_s']:.1f} ms"
        rows.append([label(row), typical, *(ratio_of(engines[name]) for name in others)])
    for phase in PHASES:
        means = (ratio_of(result["overhead"][name][phase]) for name in others)
        rows.append([f"{phase}, mean of its cells", "", *means])
    return table(["phase", name_of(baseline), *map(name_of, others)], rows)


def one_billion(result: Mapping[str, Any]) -> list[str]:
    """A row for each start of a server, then what ``ratios`` gives."""
    starts = ["without compiled code", *["with it"] * (len(result["served"]) - 1)]
    cells = [
        [name, f"{one['start_s']:.0f} s", f"{one['memory_gib']:.1f} GiB"]
        + [speed(one[f"{part}_tokens_per_s"]) for part in ("prompt", "answer")]
        for name, one in zip(starts, result["served"], strict=True)
    ]
    head = ["start", "seconds", "memory", "tokens/s of a prompt", "of an answer"]
    return [*table(head, cells), "", *ratios(result)]


def speed(rate: float) -> str:
    """Tokens per second, with two digits at least."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def label(row: Mapping[str, Any]) -> str:
    """The cell; documents on file have one context."""
    cell = case_of(row)
    return cell.label if cell.phase == "prefill" else f"decode, batch {cell.batch}"


def load(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each number of requests at a time, and server if it is named, with all ratios."""
    columns = {"at_a_time": "requests at a time", "server": "server"}
    keys = [key for key in columns if key in rows[0]]
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells.setdefault(tuple(str(row[key]) for key in keys), []).append(ratio_of(row))
    named = [[*names, *ratios] for names, ratios in cells.items()]
    return table([*(columns[key] for key in keys), *FIGURES.values()], named)


def peers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each workload and peer, with its ratios to both references."""
    references = {"hf_open_attnres": "over `generate`, eager", "vllm": "over plain vLLM"}
    cells = []
    for row in rows:
        ratios = (ratio_of(row[f"over_{reference}"]) for reference in references)
        named = row["workload"], name_of(row["peer"])
        cells.append([*named, f"{row['median_s']:.2f}", f"{row['tokens_per_s']:.0f}", *ratios])
    return table(["workload", "peer", "seconds", "tokens/s", *references.values()], cells)


def sites(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each cell: microseconds of a block of sites, by contender.

    None where vLLM's kernel is not among them.
    """
    names = ["single_pass", "two_phase", "vllm_kimi_k3", BASELINE]
    cells = []
    for (hidden, _, count, tokens), by_contender in sorted(by_cell(rows).items()):
        if not by_contender.keys() >= set(names):
            continue
        us = {name: by_contender[name]["block_us"]["median"] for name in names}
        moved = by_contender["single_pass"]["bytes"]
        speed = f"{moved / us['single_pass'] / 1e6:.2f}" if tokens > 1 else ""
        theirs = us["vllm_kimi_k3"]
        ratios = [f"{us[name] / theirs:.2f}" for name in names[:2]]
        shown = [f"{us[name]:.0f}" for name in names]
        cells.append([str(hidden), str(count), str(tokens), *shown, speed, *ratios])
    if not cells:
        return []
    head = ["d", "n", "T", "single pass", "two-phase", "vLLM's", "add + norm"]
    return table([*head, "single pass, TB/s", "/ vLLM's", "two-phase / vLLM's"], cells)


def by_cell(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, dict[str, Mapping[str, Any]]]:
    """Rows by cell and contender."""
    grouped: dict[Cell, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cell = row["hidden"], row["sites"], row["blocks"], row["tokens"]
        grouped.setdefault(cell, {})[row["contender"]] = row
    return grouped


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


def roofline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each shape: microseconds of all sites, both bounds, and the ratio to the larger."""
    cells = []
    for row in rows:
        shape = [str(row[key]) for key in ("shape", "phase", "tokens", "dtype")]
        times = [f"{row[key]:.0f}" for key in ("us", "memory_us", "arithmetic_us")]
        cells.append([*shape, name_of(row["algorithm"]), *times, f"{row['ratio']:.2f}"])
    head = ["sites of", "phase", "tokens", "dtype", "algorithm", "µs", "by bytes, µs"]
    return table([*head, "by multiply-adds, µs", "ratio"], cells)


def experts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each shape: microseconds of a layer's experts, and the ratio within rounds."""
    cells = []
    for row in rows:
        shape = [
            str(row[key]) for key in ("tokens", "experts", "top_k", "latent", "width", "dtype")
        ]
        times = [f"{figures['median']:.0f}" for figures in row["microseconds"].values()]
        ratio = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"])
        cells.append([*shape, *times, ratio])
    head = ["tokens", "experts", "of a token", "latent", "width", "dtype", "SiTU", "vLLM's SiLU"]
    return table([*head, "ratio"], cells)


def scaling(result: Mapping[str, Any]) -> list[str]:
    """A row for each value of a factor and cell: the ratio, and the share of the sites."""
    cells = []
    for factor, points in result.items():
        for value, point in points.items():
            shares = {
                (one["phase"], one["batch"], one["context"]): share(one["milliseconds"])
                for one in point["breakdown"]
                if one["engine"] == "attnres"
            }
            for row in point["cells"]:
                engines = row["engines"]
                typical = f"{1e3 * engines['baseline']['median_s']:.1f} ms"
                sites = f"{100 * shares[row['phase'], row['batch'], row['context']]:.1f} %"
                label = case_of(row).label
                cells.append([factor, value, label, typical, ratio_of(engines["attnres"]), sites])
    return table(["varied", "value", "cell", "baseline", "AttnRes", "sites"], cells)


def share(milliseconds: Mapping[str, float]) -> float:
    """The part of the time that the sites take."""
    return milliseconds["AttnRes"] / sum(milliseconds.values())


def decoders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each shape and phase on a GPU: the time with residuals, and the ratios to it."""
    cells = []
    for (shape, phase, batch, context), group in groupby(
        rows, lambda row: (row["shape"], row["name"], row["batch"], row["context"])
    ):
        residual, *others = group
        size = f"batch {batch}" if phase == "decode" else f"{context} tokens"
        typical = f"{residual['us']['median'] / 1e3:.2f}"
        cells.append([shape, f"{phase}, {size}", typical, *map(ratio_of, others)])
    head = ["shape", "phase", "residuals, ms", "single pass", "two-phase"]
    return table([*head, "two-phase, none early"], cells)


def recurrence(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each shape of a state: microseconds of a layer, and the ratio to its memory."""
    cells = []
    for row in rows:
        shape = [str(row[key]) for key in ("heads", "size", "batch")]
        times = [f"{figures['median']:.0f}" for figures in row["microseconds"].values()]
        low, high = row["ratio"]["quartiles"]
        ratio = f"{row['ratio']['median']:.2f} ({low:.2f} to {high:.2f})"
        cells.append([*shape, f"{row['state_bytes'] / 2**20:.1f}", *times, ratio])
    head = ["heads", "size", "batch", "state, MiB", *rows[0]["microseconds"]]
    return table([*head, "C++ / memory"], cells)


def trainers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each trainer's class and type: how far its logprobs are from the engine's."""
    cells = []
    for row in rows:
        nats = [f"{row[key]:.1e}" for key in ("mean", "maximum", "kl")]
        cells.append([row["trainer"], row["dtype"], *nats, f"{100 * row['outside']:g} %"])
    return table(["trainer", "dtype", "mean", "maximum", "KL", "outside"], cells)


def updates(result: Mapping[str, Any]) -> list[str]:
    """Seconds of a start with compiled code, and of an update of a server that runs."""
    cells = [
        [name, "{median:.1f} ({min:.1f} to {max:.1f})".format(**result[key])]
        for name, key in (("restart", "restart_s"), ("update", "update_s"))
    ]
    return table(["what", "seconds, median and range"], cells)


MADE = {
    "kernels": sites,
    "latency": ratios,
    "trace_cost": ratios,
    "scaling": scaling,
    "stack": decoders,
    "serving.one_billion": one_billion,
    "serving.three_billion": one_billion,
    "serving.edits": load,
    "serving.load": load,
    "peers": peers,
    "kernels.cpu_stack": stacks,
    "kernels.recurrence": recurrence,
    "kernels.roofline": roofline,
    "kernels.experts": experts,
    "serving.trainers": trainers,
    "serving.updates": updates,
}


def of(document: Mapping[str, Any]) -> list[list[str]]:
    """The lines of every table of a document, under its name if there are several."""
    made = MADE[document["benchmark"]]
    results = document["results"]
    if made is scaling or not isinstance(results, dict):
        return [made(results)]
    has_names = len(results) > 1
    return [([f"`{name}`:", ""] if has_names else []) + made(one) for name, one in results.items()]
