"""Latency of every algorithm against standard residuals, on models of stated shapes.

    python -m benchmarks.serving.latency --out benchmarks/results/cpu-latency.json
    python -m benchmarks.serving.latency --shape 768x12 --starts 10 --control
    python -m benchmarks.serving.latency --quick              does it work: tiny model, one start

What ``attnres-serve bench`` measures, for checkpoints that need no files: Llamas with eight blocks
and dummy weights in bfloat16, or a model of another family, one engine for each algorithm beside
the baseline, all in the same rounds, for as many starts as there.  ``--control`` adds a second
baseline, whose ratio should be 1.

The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from attnres_serve.bench import document, machine, report, session
from attnres_serve.bench.baseline import needs_plugin
from attnres_serve.bench.command import BASELINE
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.process import attnres, plain
from attnres_serve.bench.ratios import overheads
from attnres_serve.bench.workload import BATCHES, STEPS, Case, make_cases
from attnres_serve.families import FAMILIES
from attnres_serve.settings import ALGORITHM_KEY, ALGORITHMS
from benchmarks.common import EIGHT, Length, add_length, length_of, publish
from benchmarks.serving.models import FLAGS, models
from benchmarks.serving.shapes import LLAMAS, LONGEST, QUICK, SHAPES, Shape

CASES = tuple(make_cases(LONGEST, None, BATCHES, STEPS))
CONTROL = "control"  # the name of a second baseline, whose ratio should be 1


def measure(
    shape: Shape,
    algorithms: list[str],
    control: bool,
    length: Length,
    budget: float = inf,
    cases: Sequence[Case] = CASES,
    flags: tuple[str, ...] = FLAGS,
) -> dict[str, Any]:
    """Measure one shape: engines, cases, overheads by algorithm and phase, and how often."""
    with models(shape) as (folder, baseline, parsed):
        has_plugin = needs_plugin(FAMILIES[parsed.family])
        specs = [plain(BASELINE, baseline, flags, has_plugin)]
        specs += [attnres(name, folder, flags, {ALGORITHM_KEY: name}) for name in algorithms]
        if control:
            specs.append(plain(CONTROL, baseline, flags, has_plugin))
        measured = session.run(specs, cases, length.starts, length.rounds, budget)
    overhead = {spec.name: overheads(measured.results, spec.name, BASELINE) for spec in specs[1:]}
    return {
        "shape": asdict(shape),
        "starts": len(measured.results),
        "rounds": measured.rounds._asdict(),
        **document.content(measured, BASELINE),
        "overhead": overhead,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(LLAMAS))
    parser.add_argument("--algorithms", choices=ALGORITHMS, nargs="+", default=list(ALGORITHMS))
    add_length(parser, EIGHT)
    parser.add_argument("--control", action="store_true", help="add a second baseline")
    parser.add_argument("--quick", action="store_true", help="tiny model, one start: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shape}
    length = length_of(parser, options, 1 if options.quick else EIGHT)
    results = {}
    for name, shape in shapes.items():
        results[name] = measure(shape, options.algorithms, options.control, length)
        sys.stderr.write(f"{name}\n{report.tables(results[name])}\n\n")
    publish(
        "latency",
        arguments,
        options.out,
        quick=options.quick,
        config={
            "compiled": True,
            "flags": list(FLAGS),
            "threads": machine.cores(),
            **length.content(),
            "steps": STEPS,
            "procedure": PROCEDURE,
        },
        results=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
