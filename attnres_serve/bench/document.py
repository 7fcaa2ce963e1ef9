"""The JSON documents: ``Document`` of a measurement in engines, ``HttpDocument`` of a server.

``model_json_schema()`` returns the schema of each.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from attnres_serve.bench.ratios import Results, Samples, geometric_mean, ratio_summary
from attnres_serve.bench.session import Outcome
from attnres_serve.bench.workload import PERCENTILES, Case

Percentiles = dict[str, float]  # by p50, p90 and p99


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ratio(Part):
    """The time of an engine relative to the baseline; ``no_interval`` says why there is none."""

    ratio: float
    ci95: tuple[float, float] | None
    includes_1: bool | None
    no_interval: str | None
    start_ratios: list[float]


class Times(Part):
    """Times of an engine: TTFT of prefill, ITL of decode; ``median_s`` is by rounds.

    With drafts a step returns several tokens: ITL is of a step, ``median_s`` of a token.
    """

    median_s: float
    tokens_per_s: float
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    rounds_s: list[float]


class Compared(Times, Ratio):
    round_ratios: list[float]


class CaseTimes(Part):
    phase: Literal["prefill", "decode"]
    batch: int
    context: int
    steps: int
    engines: dict[str, Compared | Times]


class Engine(Part):
    architecture: str
    executed: dict[str, dict[str, int]]


class Config(Part):
    """The measured model, and the procedure."""

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
    discarded: int  # short ones before them
    procedure: int


class Drafts(Part):
    """Tokens of drafts by vLLM's counters, over all decoding of all starts."""

    drafts: int
    proposed: int
    accepted: int
    acceptance: float  # of the proposed tokens
    by_position: list[float]  # share of drafts whose token at this position was accepted


class Repeatable(Part):
    """The information to repeat a measurement."""

    benchmark: str
    command: str
    versions: dict[str, str]
    hardware: dict[str, Any]


class Document(Repeatable):
    benchmark: Literal["bench"] = "bench"
    config: Config
    took_s: float
    evidence_s: float | None  # for enough starts for an interval; null if there were enough
    ended_by: Literal["starts", "budget"]
    overhead: dict[str, Ratio]  # by phase
    cells: list[CaseTimes]
    engines: dict[str, Engine]
    drafts: Drafts | None


class Load(BaseModel):
    """Figures of ``vllm bench serve`` by its names, without the rest of its results."""

    max_concurrency: int
    completed: int
    duration: float  # of all requests, in seconds
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


def content(outcome: Outcome, baseline: str) -> dict[str, Any]:
    """The results by engine and by case."""
    return {
        "engines": {
            name: {key: facts[key] for key in Engine.model_fields}
            for name, facts in outcome.engines.items()
        },
        "cells": case_rows(outcome.results, baseline),
    }


def case_rows(results: Sequence[Results], baseline: str) -> list[dict[str, Any]]:
    """One row for each case: every engine's times, and the others' ratios to the baseline."""
    rows = []
    for case in results[0]:
        starts = [start[case] for start in results]
        engines = {name: _times(case, [start[name] for start in starts]) for name in starts[0]}
        for name in engines.keys() - {baseline}:
            rounds = [start[name].ratios(start[baseline]) for start in starts]
            engines[name] |= ratio_summary(rounds) | {"round_ratios": list(chain(*rounds))}
        rows.append({**asdict(case), "engines": engines})
    return rows


def _times(case: Case, starts: Sequence[Samples]) -> dict[str, Any]:
    """The times of an engine in all starts."""
    typical = geometric_mean([median(start.rounds) for start in starts])  # like the ratios
    is_prefill = case.phase == "prefill"
    values = np.percentile([*chain(*(start.times for start in starts))], PERCENTILES)
    percentiles = {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
    return {
        "median_s": typical,
        "tokens_per_s": (case.context if is_prefill else case.batch) / typical,
        "ttft_s": percentiles if is_prefill else None,
        "itl_s": None if is_prefill else percentiles,
        "rounds_s": [*chain(*(start.rounds for start in starts))],
    }
