"""The JSON documents: ``Document`` of a measurement in engines, ``HttpDocument`` of a server.

Their schemas are what ``model_json_schema()`` of each gives.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from attnres_serve.bench.ratios import Results, Samples, geometric_mean, summary
from attnres_serve.bench.session import Outcome
from attnres_serve.bench.workload import PERCENTILES, Cell

Percentiles = dict[str, float]  # by p50, p90 and p99


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ratio(Part):
    """How long an engine takes, the baseline being 1; ``no_interval`` says why there is none."""

    ratio: float
    ci95: tuple[float, float] | None
    includes_1: bool | None
    no_interval: str | None
    start_ratios: list[float]


class Times(Part):
    """Times of an engine: TTFT of prefill, ITL of decode; ``median_s`` is by rounds.

    With drafts a step gives several tokens at once: ITL is of a step, ``median_s`` of a token.
    """

    median_s: float
    tokens_per_s: float
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    rounds_s: list[float]


class Compared(Times, Ratio):
    round_ratios: list[float]


class CellTimes(Part):
    phase: Literal["prefill", "decode"]
    batch: int
    context: int
    steps: int
    engines: dict[str, Compared | Times]


class Engine(Part):
    architecture: str
    executed: dict[str, dict[str, int]]


class Config(Part):
    """What was measured, and how."""

    checkpoint: str
    format: str
    backbone: str
    layers: int
    hidden_size: int
    blocks: int
    baseline: Literal["stock vLLM", "attnres-serve without sites", "the same engine without drafts"]
    dtype: str
    compiled: bool
    backend: str
    algorithm: str
    threads: int
    flags: list[str]
    starts: int
    rounds: int  # of each start
    discarded: int  # before them
    procedure: int


class Drafts(Part):
    """Tokens of drafts by vLLM's counters, of all starts and all that was decoded there."""

    drafts: int
    proposed: int
    accepted: int
    acceptance: float  # of those proposed
    by_position: list[float]  # of the drafts those whose token at this place was accepted


class Repeatable(Part):
    """What somebody else measures the same by."""

    benchmark: str
    command: str
    versions: dict[str, str]
    hardware: dict[str, Any]


class Document(Repeatable):
    benchmark: Literal["bench"] = "bench"
    config: Config
    took_s: float
    evidence_s: float | None  # that enough starts for an interval would take; null if there are
    ended_by: Literal["starts", "budget"]
    overhead: dict[str, Ratio]  # by phase
    cells: list[CellTimes]
    engines: dict[str, Engine]
    drafts: Drafts | None


class Load(BaseModel):
    """Figures of ``vllm bench serve`` by its own names; it finds more, which is left out."""

    max_concurrency: int
    completed: int
    duration: float  # of all, in seconds
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    p50_ttft_ms: float
    p90_ttft_ms: float
    p99_ttft_ms: float
    p50_tpot_ms: float
    p90_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p90_itl_ms: float
    p99_itl_ms: float
    seed: int


class HttpDocument(Repeatable):
    benchmark: Literal["bench-http"] = "bench-http"
    loads: list[Load]


def content(found: Outcome, baseline: str) -> dict[str, Any]:
    """Results, engine by engine and cell by cell."""
    return {
        "engines": {
            name: {key: facts[key] for key in Engine.model_fields}
            for name, facts in found.engines.items()
        },
        "cells": cell_rows(found.results, baseline),
    }


def cell_rows(results: Sequence[Results], baseline: str) -> list[dict[str, Any]]:
    """One row for each cell: every engine's times, and the others' ratios to the baseline."""
    rows = []
    for cell in results[0]:
        starts = [start[cell] for start in results]
        engines = {name: _times(cell, [start[name] for start in starts]) for name in starts[0]}
        for name in engines.keys() - {baseline}:
            rounds = [start[name].ratios(start[baseline]) for start in starts]
            engines[name] |= summary(rounds) | {"round_ratios": list(chain(*rounds))}
        rows.append({**asdict(cell), "engines": engines})
    return rows


def _times(cell: Cell, starts: Sequence[Samples]) -> dict[str, Any]:
    """Times of an engine, all starts together."""
    typical = geometric_mean([median(start.rounds) for start in starts])  # as of the ratios
    is_prefill = cell.phase == "prefill"
    found = np.percentile([*chain(*(start.times for start in starts))], PERCENTILES)
    percentiles = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {
        "median_s": typical,
        "tokens_per_s": (cell.context if is_prefill else cell.batch) / typical,
        "ttft_s": percentiles if is_prefill else None,
        "itl_s": None if is_prefill else percentiles,
        "rounds_s": [*chain(*(start.rounds for start in starts))],
    }
