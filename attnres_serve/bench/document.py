"""The JSON document of a measurement in engines; its schema is ``Document.model_json_schema()``."""

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
    """How long an engine takes, the baseline being 1."""

    ratio: float
    ci95: tuple[float, float]
    includes_1: bool
    start_ratios: list[float]


class Times(Part):
    """Times of an engine: TTFT in prefill, TPOT in decode, of every round."""

    median_s: float
    tokens_per_s: float
    ttft_s: Percentiles
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
    start_s: float
    peak_memory_bytes: int | None
    kv_cache_tokens: int
    executed: dict[str, dict[str, int]]


class Config(Part):
    """What was measured, and how."""

    checkpoint: str
    baseline: str
    baseline_differs_in: list[str]
    weights: Literal["checkpoint", "dummy"]
    format: str
    backbone: str
    layers: int
    hidden_size: int
    blocks: int
    dtype: str
    compiled: bool
    backend: str | None
    algorithm: str | None
    threads: int
    flags: list[str]
    starts: int
    rounds: int
    discarded_rounds: int
    procedure: int
    interval: Literal["over starts", "over rounds"]


class Document(Part):
    benchmark: Literal["bench"] = "bench"
    command: str
    quick: bool
    versions: dict[str, str]
    hardware: dict[str, Any]
    config: Config
    took_s: float
    ended_by: Literal["starts", "budget"]
    overhead: dict[str, dict[str, Ratio]]
    cells: list[CellTimes]
    engines: dict[str, Engine]


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


def _percentiles(values: Sequence[float]) -> Percentiles:
    found = np.percentile(values, PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def interval_over(starts: int) -> dict[str, Any]:
    """Content of a document about what its intervals know."""
    return {"interval": "over starts" if starts > 1 else "over rounds"}
