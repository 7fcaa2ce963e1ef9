"""Does ``attnres-serve bench`` see what is there, and nothing else?

    python -m benchmarks.detection --out benchmarks/results/cpu-detection.json

Repeats its measurement, at the default length but with one cell for each phase, on a model against
two others: the same model again, whose interval should contain 1, and the same model with every
step made 5 % longer, whose interval should lie above 1.  The last line on stdout is one JSON
document; the table goes to stderr.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnres_serve.bench import machine, report, session
from attnres_serve.bench.command import BASELINE, CONTROL
from attnres_serve.bench.length import USUAL, Length, add_length
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.process import stock
from attnres_serve.bench.workload import STEPS, make_cells
from benchmarks import slowed_engine
from benchmarks.common import asked_length, publish
from benchmarks.latency import FLAGS, LONGEST, SHAPES, models

SLOWED = "slowed"
ENOUGH = 0.8  # of the runs must be judged rightly


def repetition(shape: str, length: Length, eager: bool, cache: str) -> dict[str, Any]:
    """The overheads of one run, of the control and of the slowed engine, by phase."""
    with models(SHAPES[shape]) as (_, twin, _):
        flags = [*FLAGS, *(["--enforce-eager"] if eager else [])]
        slowed = stock(SLOWED, twin, flags, Path(slowed_engine.__file__))
        contenders = [stock(name, twin, flags) for name in (BASELINE, CONTROL)] + [slowed]
        cells = make_cells(LONGEST, (128,), (1,), None, STEPS)
        found = session.run(contenders, cells, length, machine.cores(), None, cache)
    return {name: report.overheads(found.results, name, BASELINE) for name in (CONTROL, SLOWED)}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """In how many runs each phase was judged rightly, and how wide its intervals were."""
    rows = {}
    for phase in report.PHASES:
        control = [run[CONTROL][phase] for run in runs]
        widths = [(found["ci95"][1] - found["ci95"][0]) / 2 for found in control]
        rows[phase] = {
            "runs": len(runs),
            "control_includes_1": sum(found["includes_1"] for found in control),
            "slowed_above_1": sum(run[SLOWED][phase]["ci95"][0] > 1 for run in runs),
            "control_ratios": [found["ratio"] for found in control],
            "slowed_ratios": [run[SLOWED][phase]["ratio"] for run in runs],
            "control_start_ratios": [found["start_ratios"] for found in control],
            "half_widths": widths,
        }
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Repeat the measurement and print one JSON document; returns 1 if it is not to be trusted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="768x12")
    parser.add_argument("--runs", type=int, default=10)
    add_length(parser, USUAL)
    parser.add_argument("--enforce-eager", action="store_true", help="start faster")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    length = asked_length(parser, options, USUAL)
    with TemporaryDirectory() as cache:
        runs = [
            repetition(options.shape, length, options.enforce_eager, cache)
            for _ in range(options.runs)
        ]
    found = summarise(runs)
    for phase, row in found.items():
        sys.stderr.write(
            f"{phase}: 1 in the interval of the same model in {row['control_includes_1']} of "
            f"{row['runs']} runs (half-width {max(row['half_widths']):.3f} at most), 5 % seen in "
            f"{row['slowed_above_1']}\n"
        )
    publish(
        "detection",
        arguments,
        options.out,
        config={
            "shape": options.shape,
            "planted": slowed_engine.SHARE,
            **asdict(length),
            "procedure": PROCEDURE,
            "compiled": not options.enforce_eager,
            "flags": list(FLAGS),
        },
        results=found,
    )
    counts = ("control_includes_1", "slowed_above_1")
    rightly = min(row[count] / row["runs"] for row in found.values() for count in counts)
    return 0 if rightly >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
