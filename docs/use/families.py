"""Writes ``families.md`` beside this file from what the package knows of its families, and from
what their tests showed (``families.json``).

python docs/use/families.py
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres_serve.families import FAMILIES, checks
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit

PAGE = Path(__file__).with_name("families.md")
RESULTS = Path(__file__).with_name("families.json")
COLUMNS = ("exact", "twin", "trace", "chunked", "compiled", "TP", "PP", "EP", "LoRA", "INT8")
# Why a column of a family stays empty, where it is not for want of a test.
REASONS = {
    ("kimi_linear", "compiled"): "vLLM's class is not",
    ("mamba2", "PP"): "vLLM's class has no stages",
    ("nemotron_h", "EP"): "experts are refused",
    ("gpt_oss", "INT8"): "refused",
}
HEAD = """\
<!-- Written by families.py from the package's families and families.json; a test compares. -->

# Families

| family | `model_type` | `architectures` | Hugging Face |
|---|---|---|---|
"""
NAMES = """
The backbones that are served. In the [house format](formats.md#house-format) each has a
`model_type` and an architecture of its own. The rest of its config.json and the names of its
tensors are those of the Hugging Face model type, or as [formats](formats.md#flash-linear-attention)
says for FLA's classes. [Add another](../build/add-a-family.md).

## What was shown

"""
TAIL = """
A tiny random checkpoint of each family runs in the engine on CPU in float32, with {versions}.

| column | |
|---|---|
| exact | random queries: answers equal Hugging Face's class in float64 that is given the mixes |
| twin | zero queries: answers equal the original's in plain vLLM, and every site runs |
| trace | weights and magnitudes of every site equal the float64 model's |
| chunked | a prompt in several steps |
| compiled | by `torch.compile` |
| TP | two workers share the heads |
| PP | two stages, which part inside a block |
| EP | two workers share the experts |
| LoRA | an adapter of all that takes one equals the weights that it is merged into |
| INT8 | compressed-tensors, in bfloat16: answers are near those of its weights in float64 |

`ATTNRES_FAMILY_RESULTS=docs/use/families.json make test-families` writes the results: the first
four columns and the last two of all families, and the others of one family of each kind.
`make test-all` has them of all. A dot is what was not run, "with AMX" what vLLM turns off on other
CPUs, and "refused" what is refused by name. Experts have no adapters and no INT8 here, and neither
has [what else is refused](support.md#limits).
"""


def has_experts(family: Family) -> bool:
    keys = family.keys()
    return any("expert" in key for key in keys)


def cell(family: Family, column: str, shown: Mapping[str, Any]) -> str:
    """One cell of the table of results."""
    if column in shown.get(family.name, {}):
        return "yes"
    if (family.name, column) in REASONS:
        return REASONS[family.name, column]
    if column == "chunked" and family.is_latent:
        return "with AMX"
    if column == "LoRA" and Limit.ADAPTERS in family.limits:
        return "refused"
    if column == "INT8" and checks.unquantized in family.checks:
        return "refused"
    return "no experts" if column == "EP" and not has_experts(family) else "."


def versions(shown: Mapping[str, Mapping[str, str]]) -> str:
    """The versions of the results: those of most, and others with their families."""
    found = Counter(what for columns in shown.values() for what in columns.values())
    (usual, _), *others = found.most_common()
    parts = [usual]
    for what, _ in others:
        titles = [FAMILIES[name].title for name in shown if what in shown[name].values()]
        parts.append(f"with {what} in part: {', '.join(titles)}")
    return "; ".join(parts)


def text() -> str:
    """The page."""
    shown = json.loads(RESULTS.read_text(encoding="utf-8"))
    names = (
        f"| {family.title} | `{family.model_type}` | `{family.architecture}` | `{family.hf}` |\n"
        for family in FAMILIES.values()
    )
    table = [("family", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    table += [
        (family.title, *(cell(family, column, shown) for column in COLUMNS))
        for family in FAMILIES.values()
        if family.is_stock
    ]
    lines = (f"| {' | '.join(row)} |\n" for row in table)
    tail = TAIL.format(versions=versions(shown))
    return HEAD + "".join(names) + NAMES + "".join(lines) + tail


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
