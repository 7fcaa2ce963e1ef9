"""The page of the figures on file: what each document shows, its machine, command and tables.

    python -m benchmarks.published.page > benchmarks/results/README.md

Nothing is measured here.  ``test_serving.py`` holds the page to what this prints, and the ratios of
docs/measure/ to the page.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.published import tables

HEAD = """\
<!-- Printed by: python -m benchmarks.published.page > benchmarks/results/README.md -->

# Figures on file

[Results](../../docs/measure/results.md) and [on an H100](../../docs/measure/gpu.md) say what these
figures mean, and [method](../../docs/measure/method.md) how they are measured. Each document in
this folder has its machine, its command and the times behind its table. `benchmarks.latency` is
`benchmarks.serving.latency` today. Other modules that are gone are in these commits: `peers` in
`6a3c805`, `scaling`, `trace_cost` and `stack` in `b008bdd`, `kernels.recurrence` in `e7cb133`.
Commit `6a3c805` also has the documents that no page cites any more.
"""
BILLIONS = (
    "A model of the shape of {} with random weights: as served, and over itself without sites"
)
# What the tables of a benchmark show.
ABOUT = {
    "kernels": """
        A block of 8 sites on n finished blocks of d channels, for T tokens, with cold caches:
        microseconds, medians of rounds.""",
    "kernels.cpu_stack": """
        Nanoseconds of a site and token on one thread, for all sites of 24 layers. Ratios are of
        two-phase to the single pass within a round, with the least and the greatest.""",
    "kernels.experts": """
        Microseconds of a layer on one thread: the inner products of Kimi K3's experts with SiTU,
        and vLLM's fused experts with SiLU of the same size. Ratios are within a round, with the
        least and the greatest.""",
    "kernels.recurrence": """
        Microseconds of a layer of Kimi Delta Attention in decode on one thread, and of reading and
        writing its state in place. Ratios are of neighbouring calls, with their quartiles.""",
    "kernels.roofline": """
        Microseconds of all sites of a model, with the caches emptied before each, and the larger of
        two bounds: a copy of the bytes that they move, and their multiply-adds at the float32 rate
        of a matrix product, both measured in the same run.""",
    "latency": """
        Ratios are to the same model with standard residuals in stock vLLM, with 95 % intervals over
        starts. The control is that baseline, started a second time.""",
    "peers": """
        Ratios are medians of rounds, with 95 % intervals over the rounds of one start.""",
    "scaling": """
        One factor is varied at a time. Ratios are to the baseline, with 95 % intervals over starts.
        *sites* is their share of the time under torch's profiler.""",
    "serving.edits": """
        Ratios are to a server of the same model as it is, with 95 % intervals over the rounds of
        one start. *edits change* is one with `--enable-attnres-edits`, *statistics* the same one
        while it keeps them, *pruned* one that masks every other block at all sites.""",
    "serving.load": """
        Ratios are to stock vLLM's server, as both start by default, with 95 % intervals over the
        rounds of one start. Ours preloads tcmalloc and Intel's OpenMP; stock vLLM's does not.""",
    "serving.one_billion": f"{BILLIONS.format('Mini-K3-1H-v2')}, with 95 % intervals over starts.",
    "serving.three_billion": f"""
        {BILLIONS.format("AttnRes-3B")}, by prompts of 64 tokens and answers of 16. Other work ran
        beside it, so the ratios of this one start are no evidence.""",
    "serving.trainers": """
        The mean and the maximum of |difference| between a trainer's logprobs and the engine's, and
        KL, in nats; and the share of tokens whose ratio leaves [0.8, 1.2].""",
    "serving.updates": """
        A model of the shape of Qwen3-0.6B with random weights: replacing all weights, and a new
        start with compiled code.""",
    "stack": """
        The sublayers of a decoder with their sites, without vLLM, in one CUDA graph with cold
        caches. Ratios are to the same sublayers with standard residuals, with 95 % intervals over
        rounds.""",
    "trace_cost": """
        Ratios are to an engine with `--disable-trace`, with 95 % intervals over starts. The control
        is a second such engine. Before each request of *traced*, other tokens were traced.""",
}


def machine(document: Mapping[str, Any]) -> str:
    """The hardware, the versions, and how often a document was measured."""
    hardware, versions = document["hardware"], document["versions"]
    parts = [f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:.1f} GiB"]
    if "device" in document:
        parts = [f"{document['device']}, driver {document['driver']}"]
    named = ("python", "vllm", "torch", "triton")
    parts += [f"{name} {versions[name]}" for name in named if versions.get(name)]
    config = document.get("config", document.get("method", {}))
    parts += [
        f"{name} {config[name]}" for name in ("starts", "rounds", "procedure") if name in config
    ]
    return f"{'; '.join(parts)}."


def sections() -> Iterator[str]:
    """A section for each document."""
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        about = f"{ABOUT.get(document['benchmark'], '')} {machine(document)}"
        filled = textwrap.fill(" ".join(about.split()), 100)
        drawn = ("\n".join([*lines, ""]) for lines in tables.of(document))
        yield "\n".join(
            [f"## {path.stem}", "", filled, "", f"    {document['command']}", "", *drawn]
        )


def page() -> str:
    """The text of benchmarks/results/README.md."""
    return "\n".join([HEAD, *sections()])


if __name__ == "__main__":
    sys.stdout.write(page())
