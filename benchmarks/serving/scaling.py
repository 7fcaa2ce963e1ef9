"""How the cost of AttnRes grows with depth, blocks, hidden size, batch and context.

    python -m benchmarks.serving.scaling --out benchmarks/results/cpu-scaling.json
    python -m benchmarks.serving.scaling --vary depth blocks --starts 8

One thing is varied at a time around a Llama of 24 layers of 256 with eight blocks.  Each point is a
pair of engines, the model and its standard-residual twin in stock vLLM, measured as
``attnres-serve bench`` does, but with half its starts: there are many points, and what counts is
their course.  A point is written to ``--out`` as soon as it is done, and the command, given again,
goes on from there.  The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnres_serve.bench import machine, report, session
from attnres_serve.bench.command import ATTNRES, BASELINE
from attnres_serve.bench.length import Length, add_length
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.process import attnres, stock
from attnres_serve.bench.workload import Cell
from attnres_serve.settings import ALGORITHM_KEY, ALGORITHMS
from benchmarks.common import asked_length, describe, on_file, write
from benchmarks.serving.models import FLAGS, Shape, models

Results = dict[str, dict[str, dict[str, Any]]]  # by what is varied and its value

STEPS = 16
FEWER = Length(starts=4, rounds=4)
CENTRE = Shape(256, 24, heads=4, kv_heads=2, intermediate=768, block_size=6, vocab=4096)
CELLS = (Cell("prefill", 1, 512, 0), Cell("decode", 1, 128, STEPS))


def deep(layers: int) -> Shape:
    return replace(CENTRE, layers=layers, block_size=layers // 4)


def wide(hidden: int) -> Shape:
    return replace(CENTRE, hidden=hidden, heads=hidden // 64, intermediate=3 * hidden)


# The blocks are 1, 4, 8, 16 and one for every sublayer.
POINTS: dict[str, dict[str, tuple[Shape, Sequence[Cell]]]] = {
    "depth": {str(layers): (deep(layers), CELLS) for layers in (12, 24, 48, 96)},
    "blocks": {
        str(48 // size): (replace(CENTRE, block_size=size), CELLS) for size in (48, 12, 6, 3, 1)
    },
    "hidden": {str(hidden): (wide(hidden), CELLS) for hidden in (256, 512, 1024)},
    "batch": {"1 to 8": (CENTRE, [Cell("decode", batch, 128, STEPS) for batch in (1, 2, 4, 8)])},
    "context": {
        "64 to 960": (CENTRE, [Cell("decode", 1, context, STEPS) for context in (64, 256, 960)])
    },
}


def measure(
    shape: Shape, cells: Sequence[Cell], algorithm: str, length: Length, flags: Sequence[str]
) -> dict[str, Any]:
    """One point."""
    with models(shape) as (folder, twin, parsed):
        flags = [*FLAGS, *flags]
        contenders = [
            stock(BASELINE, twin, flags),
            attnres(ATTNRES, folder, flags, {ALGORITHM_KEY: algorithm}),
        ]
        found = session.run(contenders, cells, length, machine.cores(), parsed)
    return {"shape": asdict(shape), **report.content(found, BASELINE)}


def measured(results: Results, shape: Shape, cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Results on file of a point, which several courses may go through; None without any."""
    for what, points in POINTS.items():
        for value, point in points.items():
            if point == (shape, cells) and value in results.get(what, {}):
                return results[what][value]
    return None


def in_order(results: Results) -> Results:
    """The points as they are listed, in whichever order they were measured."""
    return {
        what: {value: results[what][value] for value in points if value in results[what]}
        for what, points in POINTS.items()
        if what in results
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vary", choices=POINTS, nargs="+", default=list(POINTS))
    parser.add_argument("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0])
    add_length(parser, FEWER)
    parser.add_argument("--enforce-eager", action="store_true", help="start faster")
    parser.add_argument("--out", type=Path, help="write the document there, and go on from it")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    length = asked_length(parser, options, FEWER)
    flags = ["--enforce-eager"] if options.enforce_eager else []
    described = describe(
        "scaling",
        arguments,
        config={
            "algorithm": options.algorithm,
            "compiled": not options.enforce_eager,
            **length.told(length.starts),
            "procedure": PROCEDURE,
            "flags": list(FLAGS),
        },
    )
    try:
        results = on_file(options.out, described).get("results", {}) if options.out else {}
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--out: {error}")
    for what in options.vary:
        for value, (shape, cells) in POINTS[what].items():
            found = measured(results, shape, cells)
            found = found or measure(shape, cells, options.algorithm, length, flags)
            results.setdefault(what, {})[value] = found
            sys.stderr.write(f"{what} {value}\n{report.tables(found)}\n\n")
            if options.out:
                write(described | {"results": in_order(results)}, options.out)
    print(json.dumps(described | {"results": in_order(results)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
