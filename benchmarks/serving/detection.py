"""Does ``attnres-serve bench`` see what is there, and nothing else?

    python -m benchmarks.serving.detection --out benchmarks/results/cpu-detection.json

Repeats its measurement, by its default starts but with one cell for each phase, on a model against
two others: the same model again, whose interval should contain 1 and be narrow, and the same model
with every step made 5 % longer, whose interval should lie above 1.  A run is written to ``--out``
as soon as it is done, and the command, given again, goes on from there.  The last line on stdout is
one JSON document; the table goes to stderr.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnres_serve.bench import machine, session
from attnres_serve.bench.command import BASELINE, CONTROL
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.process import stock
from attnres_serve.bench.ratios import PHASES, half_width, overheads
from attnres_serve.bench.workload import STARTS, STEPS, make_cells
from benchmarks.common import Length, add_length, asked_length, describe, on_file, write
from benchmarks.serving import slowed_engine
from benchmarks.serving.models import FLAGS, LONGEST, SHAPES, models

SLOWED = "slowed"
NARROW = 0.015  # half of an interval
ENOUGH = 0.8  # of the runs must be right

Run = dict[str, dict[str, dict[str, Any]]]  # by engine and phase, as in ``overheads``


def repetition(shape: str, length: Length, eager: bool, cache: str) -> Run:
    """The overheads of one run, of the control and of the slowed engine, by phase."""
    with models(SHAPES[shape]) as (_, twin, _):
        flags = [*FLAGS, *(["--enforce-eager"] if eager else [])]
        slowed = stock(SLOWED, twin, flags, Path(slowed_engine.__file__))
        contenders = [stock(name, twin, flags) for name in (BASELINE, CONTROL)] + [slowed]
        cells = make_cells(LONGEST, (128,), (1,), None, STEPS)
        found = session.run(contenders, cells, length.starts, length.rounds, machine.cores(), cache)
    return {name: overheads(found.results, name, BASELINE) for name in (CONTROL, SLOWED)}


def summarise(runs: list[Run]) -> dict[str, dict[str, int]]:
    """By phase: in how many runs each of the verdicts was right."""
    rows = {}
    for phase in PHASES:
        control = [run[CONTROL][phase] for run in runs]
        rows[phase] = {
            "control_includes_1": sum(found["includes_1"] for found in control),
            "control_is_narrow": sum(half_width(found) <= NARROW for found in control),
            "slowed_above_1": sum(run[SLOWED][phase]["ci95"][0] > 1 for run in runs),
        }
    return rows


def content(runs: list[Run]) -> dict[str, Any]:
    """Content of a document about the runs."""
    return {"results": summarise(runs), "runs": runs}


def main(arguments: list[str] | None = None) -> int:
    """Repeat the measurement and print one JSON document; returns 1 if it is not to be trusted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="768x12")
    parser.add_argument("--runs", type=int, default=10)
    add_length(parser, STARTS)
    parser.add_argument("--enforce-eager", action="store_true", help="start faster")
    parser.add_argument("--out", type=Path, help="write the document there, and go on from it")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    length = asked_length(parser, options, STARTS)
    described = describe(
        "detection",
        arguments,
        config={
            "shape": options.shape,
            "planted": slowed_engine.SHARE,
            **length.told(),
            "procedure": PROCEDURE,
            "compiled": not options.enforce_eager,
            "flags": list(FLAGS),
        },
    )
    try:
        runs = on_file(options.out, described).get("runs", []) if options.out else []
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--out: {error}")
    with TemporaryDirectory() as cache:
        for _ in range(len(runs), options.runs):
            runs.append(repetition(options.shape, length, options.enforce_eager, cache))
            if options.out:
                write(described | content(runs), options.out)
    found = content(runs)
    for phase, row in found["results"].items():
        sys.stderr.write(
            f"{phase}, of {len(runs)} runs: 1 in the interval of the same model in "
            f"{row['control_includes_1']}, half of it at most {NARROW:.1%} in "
            f"{row['control_is_narrow']}, 5 % seen in {row['slowed_above_1']}\n"
        )
    print(json.dumps(described | found))
    rightly = min(count / len(runs) for row in found["results"].values() for count in row.values())
    return 0 if rightly >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
