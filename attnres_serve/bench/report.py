"""The report of a measurement in 80 columns: the ratios, the times, and the configuration."""

import textwrap
from collections.abc import Mapping
from math import ceil
from typing import Any

from attnres_serve.bench.ratios import ratio_text
from attnres_serve.bench.session import EVIDENCE, TIMES
from attnres_serve.bench.workload import PERCENTILES, case_of

COLUMNS = 80


def render(document: Mapping[str, Any]) -> str:
    """The document as text."""
    config, hardware = document["config"], document["hardware"]
    starts, minutes = config["starts"], document["took_s"] / 60
    lines = [
        f"{ratio_text(overhead):26}{TIMES[phase]} in {phase}"
        + ("; 1 is in the interval" if overhead["includes_1"] else "")
        for phase, overhead in document["overhead"].items()
    ]
    drafts = document["drafts"]
    compared = "With drafts to without" if drafts else "AttnRes to standard residuals"
    over = f"with the 95 % interval over {starts} starts" if starts > 1 else "of one start"
    lines += ["", *_wrapped(f"{compared}, {over}.")]
    if drafts:
        places = ", ".join(f"{100 * share:.0f}" for share in drafts["by_position"])
        lines += _wrapped(
            f"{100 * drafts['acceptance']:.0f} % of {drafts['proposed']} proposed tokens were "
            f"accepted: {places} % by place in a draft."
        )
    if starts == 1:
        lines += _wrapped("A rough estimate: two starts of one model differ by a percent and more.")
    if document["evidence_s"]:
        needed = ceil(document["evidence_s"] / 60)
        lines += _wrapped(
            f"The budget had no room for {EVIDENCE} starts ({minutes:.1f} minutes); --budget "
            f"{needed} has it here."
        )
    elif document["ended_by"] == "budget":
        lines += _wrapped(
            f"The budget had no room for more starts ({minutes:.1f} minutes); a larger --budget "
            "narrows the intervals."
        )
    if not config["compiled"] and "gpu" not in hardware:
        lines += _wrapped(
            "These engines are eager, in which AttnRes may seem faster on CPU than no AttnRes: a "
            "norm of the baseline is many operators, AttnRes with its norm is one."
        )
    where = hardware.get("gpu") or f"{hardware['cpu']}, {config['threads']} threads"
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in ("vllm", "torch"))
    card = {
        "model": f"{config['checkpoint']}: {config['format']} on {config['backbone']}, "
        f"{config['layers']} layers of {config['hidden_size']}, {config['blocks']} blocks",
        "baseline": config["baseline"]
        if drafts
        else f"the same weights with standard residuals in {config['baseline']}",
        "engines": f"{config['dtype']}, {'compiled' if config['compiled'] else 'eager'}; "
        f"{config['algorithm']}, backend {config['backend']}",
        **({"prompts": "parts of Python's standard library, continued greedily"} if drafts else {}),
        "flags": " ".join(config["flags"]),
        "machine": f"{where}; {versions}",
        "took": f"{minutes:.1f} minutes",
    }
    lines += ["", tables(document), ""]
    for name, value in card.items():
        lines += _wrapped(f"{name:10}{value}", " " * 10)
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def tables(document: Mapping[str, Any]) -> str:
    """The ratio of every case, then the times of every engine."""
    engines = document["cells"][0]["engines"].values()
    several = len(engines) > 2
    # The percentiles of one start are of too few times.
    is_single = all(len(times.get("start_ratios", "1")) == 1 for times in engines)
    percentiles = [f"p{percent}" for percent in PERCENTILES[: 1 if is_single else None]]
    lines = []
    for row in document["cells"]:
        for name, times in row["engines"].items():
            if "ratio" in times:
                lines.append(f"{ratio_text(times):26}{case_of(row).label}{f', {name}' * several}")
    for phase, key in (("prefill", "ttft_s"), ("decode", "itl_s")):
        rows = [row for row in document["cells"] if row["phase"] == phase]
        if rows:
            header = f"{key[:-2].upper() + ', ms':30}{'engine':12}"
            header += "".join(f"{percentile:>9}" for percentile in percentiles)
            lines += ["", f"{header}{'tokens/s':>11}"]
        for row in rows:
            label = case_of(row).label
            for name, times in row["engines"].items():
                each = "".join(f"{1e3 * times[key][which]:9.2f}" for which in percentiles)
                lines.append(f"{label:30}{name:12}{each}{times['tokens_per_s']:11.1f}")
                label = ""
    return "\n".join(lines)
