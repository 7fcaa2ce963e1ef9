"""Cost of AttnRes in a whole decoder on a GPU, without vLLM: a stack of sublayers, both ways.

    python -m benchmarks.stack --out benchmarks/results/h200-stack.json
    python -m benchmarks.stack --shape 0.6B --rounds 30
    TRITON_INTERPRET=1 python -m benchmarks.stack --gate-only      without a GPU: the results alone

The same sublayers (matrix products, SwiGLU, SDPA over a cache in decode, causal in prefill; bf16,
random weights, shapes of an 8B and of a 0.6B model) are connected by standard residuals (addition
and RMSNorm compiled into one kernel) and, with eight blocks, by single pass and by two-phase.  Each
is one CUDA graph, replayed in turn, every round in another order, L2 emptied before.

Left out, the same for all: embedding, rotary embedding, the head, sampling, the server; so a ratio
is further from 1 than that of a whole model.  Nothing is timed that has a site which differs
from ``kernels/reference.py`` in float64, on the same outputs of the sublayers, by more than its
roundings explain (``kernel_gate``).  Two numbers stand beside each time: the bytes of weights,
caches and sites over the measured copy bandwidth, and the operations over the measured rate of a
large matrix product.

The table is on stdout; the last line there is one JSON document.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from attnres_serve.bench.machine import command_line, hardware
from attnres_serve.bench.ratios import median_interval, paired_ratios
from benchmarks.common import write
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels.__main__ import environment
from benchmarks.kernels.contenders import Run
from benchmarks.kernels.gate import first_line
from benchmarks.stack import model as stack_model
from benchmarks.stack.model import BASELINE, WAYS, Phase, Shape, Weights

CONTEXT = 1024  # of every sequence in decode
PHASES = (
    *(Phase("decode", batch, CONTEXT) for batch in (1, 8, 64, 256)),
    *(Phase("prefill", 1, tokens) for tokens in (2048, 8192)),
)
TINY_PHASES = (Phase("decode", 1, 4), Phase("decode", 3, 5), Phase("prefill", 1, 6))
NO_GPU = (
    "there is no CUDA device here: run this where there is one, or check the results alone with "
    "TRITON_INTERPRET=1 python -m benchmarks.stack --gate-only."
)


def passes_of(
    shape: Shape, weights: Weights, phase: Phase, connections: list[str]
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, float], dict[str, str]]:
    """A pass in each way, compared with the reference.

    Returns:
        Of the ways that are right, a function that runs a pass; the largest error of each, in units
        of what it may be; and what is wrong with the others.
    """
    sublayers = stack_model.Sublayers(shape, weights, phase)
    generator = torch.Generator(weights.norms.device).manual_seed(2)
    embedded = weights.norms.new_empty((phase.tokens, shape.hidden)).normal_(generator=generator)
    passes, errors, wrong = {}, {}, {}
    for name in connections:
        way = WAYS[name]
        connection = way.connection(shape, weights, phase.tokens)
        errors[name], reason = stack_model.examine(sublayers, way, connection, embedded)
        if reason:
            wrong[name] = reason
        else:
            passes[name] = partial(stack_model.forward, sublayers, connection, embedded)
    return passes, errors, wrong


def matrix_rate(stopwatch: Any, size: int = 8192) -> float:
    """Operations a second of a large square product in bf16."""
    from benchmarks.kernels import timing as kernel_timing

    one = torch.randn(size, size, device="cuda").bfloat16()
    out = torch.empty_like(one)
    us = kernel_timing.graph_time(lambda: torch.mm(one, one, out=out), stopwatch)
    return 2 * size**3 / (1e-6 * us)


def summarise(
    name: str, shape: Shape, phase: Phase, samples: dict[str, list[float]], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """The rows of a shape and phase, from the microseconds of each connection by round."""
    rows = []
    shared = stack_model.weight_and_cache_bytes(shape, phase, dtype)
    for connection, times in samples.items():
        sites = stack_model.connection_bytes(connection, shape, phase.tokens, dtype)
        row: dict[str, Any] = {"shape": name, **phase._asdict(), "connection": connection}
        row |= {"us": kernel_report.quartiles(times), "rounds": len(times)}
        row |= {"bytes": shared + sites, "site_bytes": sites}
        row["operations"] = stack_model.operations(shape, phase)
        if connection != BASELINE and BASELINE in samples:
            ratios = paired_ratios(times, samples[BASELINE])
            row |= {"ratio": median(ratios), "ci95": list(median_interval(ratios))}
        rows.append(row | {"us_rounds": times})
    return rows


def table(rows: list[dict[str, Any]], bandwidth: float, rate: float) -> str:
    """The rows for a person."""
    lines = [
        f"{'shape':7}{'phase':9}{'batch':>5}{'context':>9}  {'connection':13}{'median us':>11}"
        f"{'bytes us':>10}{'matrix us':>11}{'ratio':>8}  95 % interval"
    ]
    for row in rows:
        text = f"{row['shape']:7}{row['name']:9}{row['batch']:>5}{row['context']:>9}  "
        text += f"{row['connection']:13}{row['us']['median']:11.1f}"
        text += f"{1e6 * row['bytes'] / bandwidth:10.1f}{1e6 * row['operations'] / rate:11.1f}"
        if "ratio" in row:
            text += f"{row['ratio']:8.3f}  {row['ci95'][0]:.3f} to {row['ci95'][1]:.3f}"
        lines.append(text)
    return "\n".join(lines)


def time_passes(
    passes: dict[str, Callable[[], Tensor]], rounds: int, stopwatch: Any
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Microseconds of each pass by round, in turn; and of those that cannot be captured into a CUDA
    graph, what they raised."""
    from benchmarks.kernels import timing as kernel_timing

    for call in passes.values():
        call()
    runs = {name: Run([call], own=call, reset=lambda: None) for name, call in passes.items()}
    samples, failures = kernel_timing.measure(runs, rounds, stopwatch)
    return {name: [sum(times) for times in samples[name]] for name in samples}, failures


def main(arguments: list[str] | None = None) -> int:
    """Compare and measure what the command line asks for; 1 where that cannot be or fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--shape", choices=stack_model.SHAPES, nargs="+")
    parser.add_argument("--connections", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, 3 rounds: no evidence")
    parser.add_argument("--gate-only", action="store_true", help="compare results, time nothing")
    parser.add_argument("--out", type=Path, help="write the document there too")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    interpreted = not cuda and os.environ.get("TRITON_INTERPRET") == "1"
    if not cuda and not (interpreted and options.gate_only):
        print(NO_GPU, file=sys.stderr)
        return 1
    device = "cuda" if cuda else "cpu"
    # Triton's interpreter truncates to bf16 where compiled code rounds.
    dtype = torch.bfloat16 if cuda else torch.float32
    tiny = options.quick or interpreted
    shapes = stack_model.TINY if tiny else stack_model.SHAPES
    if options.shape and not tiny:
        shapes = {name: shapes[name] for name in options.shape}
    phases = TINY_PHASES if tiny else PHASES
    rounds = 3 if options.quick else options.rounds

    method: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "timed": False}
    if not options.gate_only:
        from benchmarks.kernels import timing as kernel_timing

        stopwatch = kernel_timing.Stopwatch(kernel_timing.ColdCache(device), 1)
        method |= {
            "timed": True,
            "rounds": rounds,
            "discarded_rounds": kernel_timing.DISCARDED,
            "copy_bytes_per_s": kernel_timing.copy_bandwidth(stopwatch, device),
            "matrix_operations_per_s": matrix_rate(stopwatch),
        }
    rows: list[dict[str, Any]] = []
    gate: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    with tqdm(total=len(shapes) * len(phases), unit="phase", file=sys.stderr) as progress:
        for name, shape in shapes.items():
            weights = stack_model.draw_weights(shape, device, dtype)
            for phase in phases:
                progress.set_postfix_str(f"{name} {phase.name} {phase.tokens}")
                where = {"shape": name, **phase._asdict()}
                wrong: dict[str | None, str] = {}
                try:
                    with torch.inference_mode():
                        passes, errors, failed = passes_of(
                            shape, weights, phase, options.connections
                        )
                        wrong |= failed
                        gate += [where | {"connection": n, "error": e} for n, e in errors.items()]
                        if method["timed"] and BASELINE in passes:
                            samples, failed = time_passes(passes, rounds, stopwatch)
                            wrong |= failed
                            rows += summarise(name, shape, phase, samples, dtype)
                except Exception as error:  # out of memory perhaps: it must not cost the others
                    wrong[None] = first_line(error)
                for connection, reason in wrong.items():
                    failures.append(where | {"connection": connection, "reason": reason})
                    said = f"{name} {phase}: {connection or 'all'} not timed: {reason}"
                    tqdm.write(said, file=sys.stderr)
                passes = {}  # before the next phase takes memory
                if cuda:
                    torch.cuda.empty_cache()
                progress.update()
    if method["timed"]:
        print(table(rows, method["copy_bytes_per_s"], method["matrix_operations_per_s"]))
    document = {
        "benchmark": "stack",
        "command": command_line(["python", "-m", "benchmarks.stack", *arguments]),
        "hardware": hardware(),
        **environment(device),
        "quick": options.quick,
        "method": method,
        "shapes": {name: vars(shape) for name, shape in shapes.items()},
        "gate": gate,
        "failures": failures,
        "results": rows,
    }
    if options.out is not None:
        write(document, options.out)
    print(json.dumps(document))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
