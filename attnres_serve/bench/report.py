"""A measurement as one document, and as a card and tables for a person."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from math import inf
from statistics import median
from typing import Any

import numpy as np

from attnres_serve.bench import busy
from attnres_serve.bench.breakdown import PARTS
from attnres_serve.bench.budget import Budget, clock_time
from attnres_serve.bench.measure import DISCARDED, PROCEDURE, Results, Samples
from attnres_serve.bench.overhead import ratio, told, widest
from attnres_serve.bench.ratios import geometric_mean
from attnres_serve.bench.session import BUDGET, STARTS, Outcome
from attnres_serve.bench.workload import PERCENTILES, Cell, cell_of
from attnres_serve.checkpoints.check import amount
from attnres_serve.formats.parsed_config import ParsedConfig


def model(parsed: ParsedConfig) -> dict[str, Any]:
    """Content of a document about the model."""
    config, spec = parsed.config, parsed.spec
    return {
        "format": parsed.format,
        "backbone": parsed.base,
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "blocks": spec.num_blocks if spec else 0,
    }


def setting(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a document about the engines, told by the facts of an AttnRes model's."""
    return {key: facts[key] for key in ("dtype", "compiled", "backend", "algorithm")} | {
        "discarded_rounds": DISCARDED,
        "procedure": PROCEDURE,
    }


def content(found: Outcome, baseline: str) -> dict[str, Any]:
    """Results, engine by engine and cell by cell."""
    facts = ("architecture", "start_s", "peak_memory_bytes", "kv_cache_tokens", "executed")
    return {
        "engines": {
            name: {key: engine[key] for key in facts} for name, engine in found.engines.items()
        },
        "cells": cell_rows(found.results, baseline),
        "breakdown": found.breakdown,
    }


def end(found: Outcome, budget: Budget, baseline: str) -> dict[str, Any]:
    """The reason why a measurement ended, and how wide its intervals were then."""
    others = [name for name in found.engines if name != baseline]
    return {
        "by": found.ended_by,
        "budget_s": None if budget.seconds == inf else budget.seconds,
        "took_s": found.took_s,
        "half_width": widest(found.results, others, baseline),
    }


def cell_rows(results: Sequence[Results], baseline: str) -> list[dict[str, Any]]:
    """One row for each cell: every engine's times, and the others' ratios to the baseline."""
    rows = []
    for cell in results[0]:
        starts = [start[cell] for start in results]
        engines = {name: _times(cell, [start[name] for start in starts]) for name in starts[0]}
        for name in engines.keys() - {baseline}:
            rounds = [start[name].ratios(start[baseline]) for start in starts]
            engines[name] |= ratio(rounds) | {"round_ratios": list(chain(*rounds))}
        rows.append({**asdict(cell), "engines": engines})
    return rows


def _times(cell: Cell, starts: Sequence[Samples]) -> dict[str, Any]:
    """Times of an engine, all starts together."""
    rounds, first, steps = (
        [seconds for start in starts for seconds in getattr(start, what)]
        for what in ("rounds", "first", "steps")
    )
    typical = geometric_mean([median(start.rounds) for start in starts])  # as of the ratios
    tokens = cell.context if cell.phase == "prefill" else cell.batch
    return {
        "median_s": typical,
        "tokens_per_s": tokens / typical,
        "ttft_s": _percentiles(first),
        "itl_s": _percentiles(steps) if steps else None,
        "rounds_s": rounds,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def render(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    has_profile = document["config"]["profile"]
    shown = tables(document) if has_profile else _cells(document)
    return "\n\n".join([_verdict(document), shown, _card(document)])


def tables(document: Mapping[str, Any]) -> str:
    """The cells, and where their time goes."""
    return f"{_cells(document)}\n\n{_breakdown(document)}"


def _card(document: Mapping[str, Any]) -> str:
    config, hardware, versions = (document[key] for key in ("config", "hardware", "versions"))
    engines = document["engines"]
    lines = {
        "checkpoint": f"{config['checkpoint']}: {config['format']} on {config['backbone']}, "
        f"{config['layers']} layers of {config['hidden_size']}, {config['blocks']} blocks",
        "baseline": _baseline(config),
        "hardware": f"{hardware['cpu']}, {hardware['cores']} cores, "
        f"{hardware['memory_gib']} GiB, {config['threads']} threads",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "engines": f"{config['dtype']}, {'compiled' if config['compiled'] else 'eager'}, no prefix "
        f"cache; flags: {' '.join(config['flags']) or 'none'}",
        "plan": f"{config['algorithm']} on the {config['backend']} backend",
        "starts": _starts(config["starts"], engines),
        "rounds": f"{config['rounds']} of {len(document['cells'])} cells in each start, "
        f"interleaved, after {config['discarded_rounds']} that do not count",
        "memory": ", ".join(
            f"{name} {amount(facts['peak_memory_bytes'])}" for name, facts in engines.items()
        )
        + " at most, the start included (processes of one model differ by a tenth)"
        if all(facts["peak_memory_bytes"] is not None for facts in engines.values())
        else "not known with several workers",
    }
    if document["quick"]:
        lines["note"] = "quick: eager and few rounds, a trial of the command and no evidence"
    return "\n".join(f"{name:11}{value}" for name, value in lines.items())


def _cells(document: Mapping[str, Any]) -> str:
    return "\n\n".join(filter(None, [_ratios(document), _latencies(document)]))


def _ratios(document: Mapping[str, Any]) -> str:
    """A line for every ratio that is believed; empty without any."""
    digits = _digits(document)
    several = len(document["engines"]) > 2
    lines = [
        f"{times['ratio']:<5.{digits}f}  "
        + "{:.{digits}f} to {:.{digits}f}".format(*times["ci95"], digits=digits).ljust(16)
        + cell_of(row).label
        + (f", {name}" if several else "")
        for row in document["cells"]
        for name, times in row["engines"].items()
        if "ratio" in times
    ]
    return "\n".join(["ratio  95 % interval   of", *lines]) if lines else ""


def _latencies(document: Mapping[str, Any]) -> str:
    """Times of every engine; of a trial, whose percentiles say nothing, only the typical one."""
    is_trial = document.get("quick", False)
    head = "" if is_trial else f"{'p90':>9}{'p99':>9}"
    lines = [f"{'milliseconds':32}{'engine':10}{'typical':>9}{head}{'tokens/s':>11}"]
    for row in document["cells"]:
        label = cell_of(row).label
        for name, times in row["engines"].items():
            typical, speed = 1e3 * times["median_s"], times["tokens_per_s"]
            line = f"{label:32}{name:10}"
            if is_trial:
                line += f"{_two_digits(typical):>9}{_two_digits(speed):>11}"
            else:
                each = times["itl_s"] or times["ttft_s"]  # of decode and of prefill
                tail = "".join(f"{1e3 * each[percent]:9.2f}" for percent in ("p90", "p99"))
                line += f"{typical:9.2f}{tail}{speed:11.1f}"
            lines.append(line)
            label = ""
    lines.append("TTFT in prefill, TPOT in decode: the mean of the starts' medians.")
    if not is_trial:
        lines.append("Percentiles are of every prompt's TTFT and of every full step's ITL.")
    return "\n".join(lines)


def _digits(document: Mapping[str, Any]) -> int:
    """Decimals of a ratio; a trial's is believed where its interval reaches some percent."""
    return 2 if document.get("quick", False) else 3


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):.12g}"


def fitted(text: str, columns: int = 80) -> str:
    """A report whose long lines go on below what their names stand beside."""
    lines: list[str] = []
    for line in text.splitlines():
        named = re.match(r"\S+  +(?=\S)", line)
        indent = " " * len(named[0]) if named else ""
        lines += (
            textwrap.wrap(
                line,
                columns,
                subsequent_indent=indent,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
            or [""]
            if len(line) > columns
            else [line]
        )
    return "\n".join(lines)


def _breakdown(document: Mapping[str, Any]) -> str:
    found = document["breakdown"]
    if found is None:
        return "Where the time goes is told for one worker and not for the torch backend."
    shown = [part for part in PARTS if any(part in row["milliseconds"] for row in found)]
    lines = ["milliseconds under the profiler, median of some generations of the first start"]
    lines.append(f"{'':32}{'engine':14}" + "".join(f"{part:>11}" for part in shown))
    for row in found:
        label = cell_of(row).label
        line = f"{label:32}{row['engine']:14}"
        line += "".join(f"{row['milliseconds'].get(part, 0.0):11.3f}" for part in shown)
        if row["site_bytes"]:
            line += f"   sites move {amount(row['site_bytes'])}"
        lines.append(line)
    return "\n".join(lines)


def _starts(number: int, engines: Mapping[str, Any]) -> str:
    took = ", ".join(f"{name} {facts['start_s']:.0f} s" for name, facts in engines.items())
    if number == 1:
        return f"one of every engine, so the luck of a process is not known; {took}"
    return f"{number} of every engine, each in a new process; the first: {took}"


def _baseline(config: Mapping[str, Any]) -> str:
    if config["baseline"] == "auto":
        return "the base family's class with the same weights, in stock vLLM"
    if config["baseline"] == "ours":
        return "our class of it without sites, as stock vLLM has none that runs here"
    differs = ", ".join(config["baseline_differs_in"])
    return f"{config['baseline']}, in stock vLLM" + (
        f"; ANOTHER SHAPE: it differs in {differs}" if differs else ""
    )


def _verdict(document: Mapping[str, Any]) -> str:
    quick, digits = "A trial, no evidence: " if document["quick"] else "", _digits(document)
    lines = [
        f"{phase:8} {quick}AttnRes takes {told(found, digits)} times as long as the baseline"
        + ("; 1 is in the interval." if found["includes_1"] else ".")
        for phase, found in document["overhead"].items()
        if found is not None
    ]
    lines += [
        f"{phase:8} the control, a second baseline, takes {told(found, digits)} times as long."
        for phase, found in (document["control"] or {}).items()
        if found is not None
    ]
    if document["trust"]:
        lines += busy.verdict(document["trust"])
    if document["config"]["starts"] == 1 and any(document["overhead"].values()):
        lines.append(
            "Every engine was started once, and the intervals are over rounds: they do not know "
            "the luck of a process (where its memory lies), as those of several --starts do."
        )
    return "\n".join([*lines, *_ending(document["end"], document["config"])])


def _ending(end: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Why a measurement ended before its intervals were narrow, if it did."""
    until, starts = config["until"], config["starts"]
    reach = f"The widest interval reaches {end['half_width']:.1%} to a side"
    aim = f", where {until['half_width']:.1%} is the aim" if until else ""
    made = f"{starts} start{'s' if starts > 1 else ''}"
    if end["by"] == BUDGET:
        minutes = f"The budget of {end['budget_s'] / 60:.3g} minutes"
        took = clock_time(end["took_s"])
        if end["took_s"] > end["budget_s"]:
            why = f"{minutes} was spent before the first start was finished, which took {took}."
        else:
            why = f"{minutes} ended the measurement after {made} ({took}): another had no room."
        return [f"{why} {reach}{aim}. A larger --budget narrows it."]
    if until and end["by"] == STARTS:
        return [f"{reach}{aim}: {made} were too few for how this machine differs between starts."]
    return []
