"""The same cells over HTTP: vLLM's own benchmark client against any OpenAI-compatible server."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import SystemRandom
from typing import Any, Literal

from attnres_serve.address import base_of, past_proxies
from attnres_serve.bench import machine, workload
from attnres_serve.bench.baseline import read
from attnres_serve.bench.document import Part, Percentiles
from attnres_serve.bench.server import Served
from attnres_serve.bench.workload import PERCENTILES, Cell, cell_of
from attnres_serve.checkpoints import needs
from attnres_serve.compat import bench_client
from attnres_serve.errors import SettingError

METRICS = ("ttft", "tpot", "itl")
REQUESTS = 20  # for every one that runs at a time
SPARE = 16  # the client's texts may have more tokens than asked, so a part of the context is spared


class HttpCell(Part):
    """A cell as the client asks it: requests that begin as others end, not all at once."""

    phase: Literal["prefill", "decode"]
    batch: int
    context: int
    steps: int
    seed: int
    requests: int
    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles | None
    itl_s: Percentiles | None


class HttpDocument(Part):
    benchmark: Literal["bench-http"] = "bench-http"
    command: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    checkpoint: str
    flags: list[str]
    cells: list[HttpCell]


def measure(
    checkpoint: str,
    own: argparse.Namespace,
    flags: list[str],
    served: Served,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a measurement of a server.

    Args:
        checkpoint: is read for its tokenizer.
        own: what ``command.add_arguments`` defines.
        flags: further flags of vLLM's client.
        served: what is there (``server.check_there``).
        command: the whole command line.

    Raises:
        SettingError: the server cannot be asked, or a request failed.
    """
    source = read(checkpoint, has_weights=False)
    longest = int(min(needs.context(source.parsed.config), served.longest))
    longest -= longest // SPARE
    steps = own.steps or workload.STEPS
    cells = workload.make_cells(longest, own.prompt_lengths, own.batches, own.contexts, steps)
    rows = []
    for cell in cells:
        asked = {
            "base-url": base_of(own.http),
            "model": served.model,
            "tokenizer": str(source.folder),
            "dataset-name": "random",
            "random-input-len": cell.context,
            "random-output-len": cell.max_tokens,
            "num-prompts": REQUESTS * cell.batch,
            "max-concurrency": cell.batch,
            "num-warmups": 0,  # the client's own are its first prompt, which the server then caches
            "percentile-metrics": ",".join(METRICS),
            "metric-percentiles": ",".join(map(str, PERCENTILES)),
        }
        _ask(cell, asked | {"num-prompts": cell.batch}, flags)
        # The first run was the check that the server is there, too.
        seed, found = _ask(cell, asked | {"ready-check-timeout-sec": 0}, flags)
        rows.append(_row(cell, found) | {"seed": seed})
    document = {
        "command": machine.command_line(["attnres-serve", *command]),
        "versions": machine.versions(),
        "hardware": machine.hardware(),
        "checkpoint": source.folder.name,
        "flags": machine.shown(flags),
        "cells": rows,
    }
    return HttpDocument.model_validate(document).model_dump()


def _ask(cell: Cell, asked: Mapping[str, Any], flags: list[str]) -> tuple[int, dict[str, Any]]:
    """Run the client once; returns its seed, which no other run has, and what it found.

    The server may keep what it has computed of a prompt, so no prompt may come twice.
    """
    seed = SystemRandom().randrange(2**31)
    words = [f"--{flag}={value}" for flag, value in {**asked, "seed": seed}.items()]
    with past_proxies(asked["base-url"]):
        found = bench_client.ask_over_http([*words, "--ignore-eos", *flags])
    if found.get("failed") or found["completed"] != asked["num-prompts"]:
        raise SettingError(
            f"{found['completed']} of {asked['num-prompts']} requests to {asked['base-url']} "
            f"succeeded ({cell.label}); look into the server's log."
        )
    return seed, found


def _row(cell: Cell, found: Mapping[str, Any]) -> dict[str, Any]:
    row = {**asdict(cell), "steps": cell.max_tokens - 1}  # all are timed
    row |= {"requests": found["completed"], "seconds": found["duration"]}
    row["prompt_tokens_per_s"] = found["total_input_tokens"] / found["duration"]
    row["output_tokens_per_s"] = found["output_throughput"]
    for metric in METRICS:
        # One token has no time between tokens, for which the client says 0.
        row[f"{metric}_s"] = (
            None
            if cell.phase == "prefill" and metric != "ttft"
            else {f"p{percent}": found[f"p{percent}_{metric}_ms"] / 1e3 for percent in PERCENTILES}
        )
    return row


def render(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    percents = [f"p{percent}" for percent in PERCENTILES]
    head = "".join(f"{percent:>9}" for percent in percents)
    lines = [f"{'':32}{'tokens/s':>10}   ms  {head}"]
    for row in document["cells"]:
        cell = cell_of(row)
        counted = "prompt" if cell.phase == "prefill" else "output"
        label = cell.label if cell.phase == "prefill" else _whole(cell)
        begin = f"{label:32}{row[f'{counted}_tokens_per_s']:10.1f}"
        for metric in METRICS:
            if found := row[f"{metric}_s"]:
                times = "".join(f"{1e3 * found[percent]:9.2f}" for percent in percents)
                lines.append(f"{begin:42}   {metric.upper():4}{times}")
                begin = ""
    lines.append("tokens/s: of prompts in prefill, else of answers, the time of their prompts too.")
    return "\n".join(lines)


def _whole(cell: Cell) -> str:
    return f"{cell.context} + {1 + cell.steps} tokens, {cell.batch} at a time"
