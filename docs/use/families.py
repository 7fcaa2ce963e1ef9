"""Writes ``families.md`` beside this file from what the package knows of its families, and from
what their tests showed (``families.json``).

python docs/use/families.py
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from attnres_serve.families import FAMILIES, checks
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit

PAGE = Path(__file__).with_name("families.md")
RESULTS = Path(__file__).with_name("families.json")
TESTS = {
    "exact": "with random queries, answers equal Hugging Face's class in float64 with mixes added",
    "twin": "with zero queries, answers equal the original's in plain vLLM",
    "sharded": "two workers divide the [sites](scaling.md#sharded-sites)",
    "trace": "weights and magnitudes of every site equal the float64 model's",
    "chunked": "a prompt is computed in several steps",
    "LoRA": "an adapter gives the answers of the weights that it is merged into",
    "INT8": "compressed-tensors in bfloat16 answers close to its weights in float64",
    "compiled": "the model is compiled by `torch.compile`",
    "TP": "two workers share the heads",
    "PP": "two stages divide a block",
    "EP": "two workers share the experts",
}
OF_ALL = 7  # tests that are for all families; the others are for one of each kind
# What cannot pass, and why.
REASONS = {
    ("mamba2", "PP"): "vLLM's class has no stages",
    ("nemotron_h", "EP"): "experts are refused",
    ("gpt_oss", "INT8"): "refused",
}
HEAD = """\
<!-- Written by families.py from the families of the package and families.json. -->

# Families

| family | `model_type` | `architectures` |
|---|---|---|
"""
NAMES = """
These model families are served. In the [house format](formats.md#house-format) each has its own
`model_type` and architecture. The other keys of config.json and the names of the tensors are those
of the Hugging Face model type, which is what follows `attnres_` ({others}).
For FLA's classes, see [formats](formats.md#flash-linear-attention). You can
[add another](../build/add-a-family.md).

## Prefixes

A prefix that several prompts share is computed once. On a CPU vLLM cannot continue a cached
prefix of {uncached} (and so of Kimi K3).
On no device has it such a cache for Gated DeltaNet and Kimi Delta Attention. The start of a server
says so.

## What was tested

Each test runs a tiny random checkpoint in the engine on CPU, in float32, with {versions}.

| test | what it shows | passed by |
|---|---|---|
"""
TAIL = """
The last four tests run on one family of each kind; `make test-all` runs them on all. AliceAI,
Gated DeltaNet, Kimi Delta Attention and the Llama with an attention gate have tests of their own.
Experts take no adapters and no INT8. [Support](support.md#limits) lists what else is refused.

`FAMILY_RESULTS=docs/use/families.json make test-families` records the results.
"""


def reason(family: Family, test: str) -> str:
    """Reason why a family did not pass a test."""
    if (family.name, test) in REASONS:
        return REASONS[family.name, test]
    is_refused = (test == "LoRA" and Limit.ADAPTERS in family.limits) or (
        test == "INT8" and checks.unquantized in family.checks
    )
    return "refused" if is_refused else "not run"


def passed_by(test: str, shown: Mapping[str, Mapping[str, str]]) -> str:
    """Families that passed a test, and the exceptions that have a reason."""
    stock = [family for family in FAMILIES.values() if family.is_stock]
    passed = [family.title for family in stock if test in shown.get(family.name, {})]
    others: dict[str, list[str]] = {}
    for family in stock:
        if family.title not in passed:
            others.setdefault(reason(family, test), []).append(family.title)
    is_of_all = [*TESTS].index(test) < OF_ALL
    if not is_of_all:
        others.pop("not run", None)
    named = "; ".join(f"{', '.join(titles)} ({why})" for why, titles in others.items())
    if is_of_all:
        return f"all except {named}" if named else "all"
    return ", ".join(passed) + (f"; not {named}" if named else "")


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
        f"| {family.title} | `{family.model_type}` | `{family.architecture}` |\n"
        for family in FAMILIES.values()
    )
    others = ", ".join(
        f"for {family.title}: `{family.hf}`"
        for family in FAMILIES.values()
        if family.model_type != f"attnres_{family.hf}"
    )
    tests = (f"| {test} | {what} | {passed_by(test, shown)} |\n" for test, what in TESTS.items())
    uncached = [
        family.title for family in FAMILIES.values() if Limit.PREFIX_CACHING in family.limits
    ]
    listed = f"{', '.join(uncached[:-1])} and {uncached[-1]}"
    found = NAMES.format(others=others, uncached=listed, versions=versions(shown))
    return HEAD + "".join(names) + found + "".join(tests) + TAIL


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
