"""What the benchmarks share: the document that every one of them prints."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attnres_serve.bench.machine import command_line, hardware, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def publish(name: str, arguments: Sequence[str], out: Path | None, **content: Any) -> None:
    """Print the document of a benchmark as one line; with ``out`` also write it there, indented."""
    document = {
        "benchmark": name,
        "command": command_line(["python", "-m", f"benchmarks.{name}", *arguments]),
        "versions": versions(),
        "hardware": hardware(),
        **content,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")
