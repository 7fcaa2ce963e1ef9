"""Shared by the benchmarks: how long they measure, and the document that they print."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from attnres_serve.bench.machine import repeatable
from attnres_serve.bench.workload import rounds_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EIGHT = 8  # starts


@dataclass(frozen=True)
class Length:
    """How often every engine is started, and the rounds of each start."""

    starts: int
    rounds: int

    def content(self) -> dict[str, Any]:
        """Content of a document about the length, and what its intervals are over."""
        return asdict(self) | {"interval": "over starts" if self.starts > 1 else None}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def add_length(parser: argparse.ArgumentParser, starts: int) -> None:
    """The flags; ``starts`` is what holds without them."""
    parser.add_argument("--starts", type=int, metavar="N", help=f"of engines (default: {starts})")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each start")


def length_of(parser: argparse.ArgumentParser, options: argparse.Namespace, usual: int) -> Length:
    """The length by the flags of ``add_length``; one that has no interval ends with a sentence."""
    starts = usual if options.starts is None else options.starts
    rounds = rounds_of(starts) if options.rounds is None else options.rounds
    least = 2 if starts == 1 else 1  # rounds of a single start are what its interval is over
    for name, number, expected in (("starts", starts, 1), ("rounds", rounds, least)):
        if number < expected:
            parser.error(f"--{name} is {number}; expected at least {expected}.")
    return Length(starts, rounds)


def json_text(value: Any, indent: str = "") -> str:
    """JSON that a person and ``git diff`` can read: an item of a list of objects is one line.

    Objects are indented if they hold other objects; everything else is one line.
    """
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        inner = indent + " "
        lines = [f"{json.dumps(key)}: {json_text(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        lines = [f"{indent} {json.dumps(item)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value)


def write(document: dict[str, Any], out: Path) -> None:
    """Write a document into a file, as ``json_text`` has it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json_text(document) + "\n")


def publish(name: str, arguments: Sequence[str], out: Path | None, **content: Any) -> None:
    """Print the document of a benchmark as one line; with ``out`` also write it there."""
    command = ["python", "-m", f"benchmarks.{name}", *arguments]
    document = {"benchmark": name, **repeatable(command), **content}
    if out is not None:
        write(document, out)
    sys.stdout.write(json.dumps(document) + "\n")
