"""The same cells over HTTP: vLLM's own benchmark client against any OpenAI-compatible server."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnres_serve import compat
from attnres_serve.bench import machine, workload
from attnres_serve.bench.baseline import read
from attnres_serve.bench.workload import PERCENTILES, Cell, cell_of
from attnres_serve.errors import SettingError

METRICS = ("ttft", "tpot", "itl")


def measure(own: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The document of a measurement of a server.

    Args:
        own: what ``command.add_arguments`` defines; the checkpoint is read for its tokenizer.
        flags: further flags of vLLM's client.

    Raises:
        SettingError: the server cannot be asked, or a request failed.
    """
    source = read(own.checkpoint, has_weights=False)
    rounds = own.rounds or workload.ROUNDS
    longest = source.translation.config["max_position_embeddings"]
    steps = own.steps or workload.STEPS
    cells = workload.make_cells(longest, own.prompt_lengths, own.batches, own.contexts, steps)
    rows = []
    for number, cell in enumerate(cells):
        asked = {
            "base-url": own.http.rstrip("/"),
            "tokenizer": str(source.folder),
            "dataset-name": "random",
            "random-input-len": cell.context,
            "random-output-len": 1 if cell.phase == "prefill" else 1 + cell.steps,
            "num-prompts": rounds * cell.batch,
            "max-concurrency": cell.batch,
            "num-warmups": workload.WARM_STEPS,
            "seed": number,
            "percentile-metrics": ",".join(METRICS),
            "metric-percentiles": ",".join(map(str, PERCENTILES)),
        }
        if own.model:
            asked |= {"model": own.model}
        words = [word for flag, value in asked.items() for word in (f"--{flag}", str(value))]
        found = compat.ask_over_http([*words, "--ignore-eos", *flags])
        if found.get("failed") or found["completed"] != asked["num-prompts"]:
            raise SettingError(
                f"{found['completed']} of {asked['num-prompts']} requests to {own.http} succeeded "
                f"({cell.label}); look into the server's log."
            )
        rows.append(_row(cell, found))
    return {
        "benchmark": "bench-http",
        "versions": machine.versions(),
        "hardware": machine.hardware(),
        "config": {"checkpoint": source.folder.name, "rounds": rounds, "flags": flags},
        "cells": rows,
    }


def _row(cell: Cell, found: Mapping[str, Any]) -> dict[str, Any]:
    row = {**asdict(cell), "requests": found["completed"], "seconds": found["duration"]}
    row["output_tokens_per_s"] = found["output_throughput"]
    for metric in METRICS:
        row[f"{metric}_s"] = {
            f"p{percent}": found[f"p{percent}_{metric}_ms"] / 1e3 for percent in PERCENTILES
        }
    return row


def render(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    head = f"{'':32}{'tokens/s':>10}"
    head += "".join(f"{metric.upper()} p50{'':6}p99".rjust(22) for metric in METRICS)
    lines = [head]
    for row in document["cells"]:
        line = f"{cell_of(row).label:32}{row['output_tokens_per_s']:10.1f}"
        for metric in METRICS:
            found = row[f"{metric}_s"]
            line += f"{1e3 * found['p50']:10.2f}{1e3 * found['p99']:9.2f} ms"
        lines.append(line)
    return "\n".join(lines)
