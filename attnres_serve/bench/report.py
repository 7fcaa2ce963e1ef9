"""A measurement for a person: the ratios, tables of the times, and what was measured."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from attnres_serve.bench.ratios import decimals, told
from attnres_serve.bench.workload import cell_of
from attnres_serve.checkpoints.check import amount


def render(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    return "\n\n".join([_verdict(document), tables(document), _card(document)])


def tables(document: Mapping[str, Any]) -> str:
    """A line for every ratio, then one for every engine's times."""
    several = len(document["engines"]) > 2
    lines = ["ratio  95 % interval   of"]
    for row in document["cells"]:
        for name, times in row["engines"].items():
            if "ratio" in times:
                digits = decimals(times)
                low, high = (f"{value:.{digits}f}" for value in times["ci95"])
                engine = f", {name}" if several else ""
                lines.append(
                    f"{times['ratio']:<5.{digits}f}  {low + ' to ' + high:16}"
                    f"{cell_of(row).label}{engine}"
                )
    return "\n".join([*lines, "", *_latencies(document)])


def _latencies(document: Mapping[str, Any]) -> list[str]:
    """Times of every engine; with one start, whose percentiles say little, two digits of each."""
    times = document["cells"][0]["engines"].values()
    is_single = all(len(one["start_ratios"]) == 1 for one in times if "ratio" in one)
    percents = ("p50",) if is_single else ("p50", "p90", "p99")
    lines: list[str] = []
    for phase, key, word in (("prefill", "ttft_s", "TTFT"), ("decode", "itl_s", "ITL")):
        rows = [row for row in document["cells"] if row["phase"] == phase]
        if rows:
            head = "".join(f"{percent:>9}" for percent in percents)
            lines.append(f"{word + ', ms':32}{'engine':10}{head}{'tokens/s':>11}")
        for row in rows:
            label = cell_of(row).label
            for name, one in row["engines"].items():
                each = [1e3 * one[key][percent] for percent in percents]
                if is_single:
                    shown = f"{_two_digits(each[0]):>9}{_two_digits(one['tokens_per_s']):>11}"
                else:
                    shown = "".join(f"{ms:9.2f}" for ms in each) + f"{one['tokens_per_s']:11.1f}"
                lines.append(f"{label:32}{name:10}{shown}")
                label = ""
    return lines


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):.12g}"


def _verdict(document: Mapping[str, Any]) -> str:
    config, starts = document["config"], document["config"]["starts"]
    lines = []
    for name, phases in document["overhead"].items():
        whose = "AttnRes" if name == "attnres" else "the control, a second baseline,"
        for phase, found in phases.items():
            one = "; 1 is in the interval." if found["includes_1"] else "."
            lines.append(
                f"{phase:8} {whose} takes {told(found)} times as long as the baseline{one}"
            )
    if starts == 1:
        lines.append(
            "Every engine was started once, and the intervals are over rounds: they do not know "
            "that two starts of one model differ by a percent and more. No evidence: only several "
            "starts are."
        )
    if not config["compiled"] and "gpu" not in document["hardware"]:
        lines.append(
            "These engines are eager. On CPU a norm of the baseline is then many operators, and "
            "AttnRes with its norm is one, so the ratio may be below 1. It is none of compiled "
            "engines."
        )
    if document["ended_by"] == "budget":
        lines.append(
            f"The budget left no room for more than {starts} "
            f"start{'s' if starts > 1 else ''} ({document['took_s'] / 60:.1f} minutes); a larger "
            "--budget narrows the intervals."
        )
    return "\n".join(lines)


def _card(document: Mapping[str, Any]) -> str:
    config, hardware, versions = (document[key] for key in ("config", "hardware", "versions"))
    engines = document["engines"]
    took = ", ".join(f"{name} {facts['start_s']:.0f} s" for name, facts in engines.items())
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
        "starts": f"{config['starts']} of every engine, each in a new process; the first: {took}",
        "rounds": f"{config['rounds']} of {len(document['cells'])} cells in each start, "
        f"interleaved, after {config['discarded_rounds']} that do not count",
        "memory": ", ".join(
            f"{name} {amount(facts['peak_memory_bytes'])}" for name, facts in engines.items()
        )
        + " at most, the start included (processes of one model differ by a tenth)"
        if all(facts["peak_memory_bytes"] is not None for facts in engines.values())
        else "not known with several workers",
    }
    return "\n".join(f"{name:11}{value}" for name, value in lines.items())


def _baseline(config: Mapping[str, Any]) -> str:
    if config["baseline"] == "auto":
        return "the base family's class with the same weights, in stock vLLM"
    if config["baseline"] == "ours":
        return "our class of it without sites, as stock vLLM has none that runs here"
    differs = ", ".join(config["baseline_differs_in"])
    return f"{config['baseline']}, in stock vLLM" + (
        f"; ANOTHER SHAPE: it differs in {differs}" if differs else ""
    )


def fitted(text: str, columns: int = 80) -> str:
    """A report whose long lines go on below what their names stand beside."""
    lines: list[str] = []
    for line in text.splitlines():
        named = re.match(r"\S+  +(?=\S)", line)
        indent = " " * len(named[0]) if named else ""
        wrapped = textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
        lines += wrapped if len(line) > columns else [line]
    return "\n".join(lines)
