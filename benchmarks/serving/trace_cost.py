"""Cost of traces for the requests that are not traced.

    python -m benchmarks.serving.trace_cost --out benchmarks/results/cpu-trace-cost.json
    python -m benchmarks.serving.trace_cost --quick       does it work: tiny model, eager, one start

One model in four engines, asked in turn with the same fresh prompts: with ``--disable-trace``, the
baseline; with traces allowed; with a trace of other tokens before every request; and a second one
of the first kind, the control, whose ratio should be 1.  In several starts, because what traces
cost may be less than two processes differ by.

The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnres_serve.bench import machine, report, session
from attnres_serve.bench.command import CONTROL
from attnres_serve.bench.length import TRIAL, Length, add_length
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.overhead import overheads
from attnres_serve.bench.process import attnres
from attnres_serve.bench.workload import BATCHES, STEPS, make_cells
from attnres_serve.settings import TRACE_KEY
from benchmarks.common import EIGHT, asked_length, publish
from benchmarks.serving import traced_engine
from benchmarks.serving.models import FLAGS, LONGEST, QUICK, SHAPES, Shape, models

DISABLED, ALLOWED, TRACED = "disabled", "allowed", "traced"


def measure(shape: Shape, length: Length, threads: int, steps: int, eager: bool) -> dict[str, Any]:
    """Measure one shape: engines, cells, overheads by engine and phase."""
    flags = [*FLAGS, *(["--enforce-eager"] if eager else [])]
    with models(shape) as (folder, _, parsed):
        off, on = {TRACE_KEY: "off"}, {TRACE_KEY: "on"}
        contenders = [
            attnres(DISABLED, folder, flags, off),
            attnres(ALLOWED, folder, flags, on),
            replace(attnres(TRACED, folder, flags, on), script=Path(str(traced_engine.__file__))),
            attnres(CONTROL, folder, flags, off),
        ]
        cells = make_cells(LONGEST, None, BATCHES, None, steps)
        found = session.run(contenders, cells, length, threads, parsed)
    return {
        "shape": asdict(shape),
        **report.content(found, DISABLED),
        "overhead": {
            contender.name: overheads(found.results, contender.name, DISABLED)
            for contender in contenders[1:]
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="768x12")
    add_length(parser, EIGHT)
    parser.add_argument("--steps", type=int, default=STEPS, help="of decode")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="tiny, eager, one start: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    ((name, shape),) = QUICK.items() if options.quick else [(options.shape, SHAPES[options.shape])]
    length = asked_length(parser, options, TRIAL if options.quick else EIGHT)
    found = measure(shape, length, options.threads, options.steps, options.quick)
    sys.stderr.write(f"{name}\n{report.tables(found)}\n")
    for contender, phases in found["overhead"].items():
        for phase, one in phases.items():
            low, high = one["ci95"]
            sys.stderr.write(
                f"{phase}, {contender}: {one['ratio']:.3f} ({low:.3f} to {high:.3f})\n"
            )
    publish(
        "trace_cost",
        arguments,
        options.out,
        quick=options.quick,
        config={
            "compiled": not options.quick,
            "flags": list(FLAGS),
            "threads": options.threads,
            **length.told(length.starts),
            "steps": options.steps,
            "procedure": PROCEDURE,
        },
        results={name: found},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
