"""All sites of a model on CPU beside what the machine can do: ``python -m benchmarks.kernels``.

The two bounds of a shape are times.  One is that of a copy of as many bytes as its sites read and
write (``traffic.py``), each address once in a call.  It is measured in the same run, on as much
memory as the shape's bank, which caches may hold.  The other is that of the multiply-adds of
scores and mixes, two for each element of a pair of site and source, at the float32 rate of torch's
matrix product.  All is timed by the clock on all threads of torch, with sites called as compiled
graphs call them.  Before each site some megabytes pass through the caches, as sublayers do, which
is not timed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from attnres_serve.compat.workarounds import malloc
from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.cpp import direct
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.backend import MANY_BLOCKS
from benchmarks.common import publish
from benchmarks.kernels import cpu_stack, traffic
from benchmarks.kernels.traffic import SiteRow
from benchmarks.published import tables


class Shape(NamedTuple):
    """Sites of a model; ``block`` in sublayers, 1 is Full AttnRes."""

    layers: int
    hidden: int
    block: int

    def __str__(self) -> str:
        kind = "Full" if self.block == 1 else f"Block of {self.block}"
        return f"{kind}, {self.layers} x {self.hidden}"


SHAPES = (Shape(28, 1024, 8), Shape(28, 1024, 16))
SHAPES += (Shape(24, 256, 1), Shape(16, 1024, 1), Shape(28, 1024, 1))
PREFILL = 128  # tokens; fewer are decode
TOKENS = (1, 8, PREFILL, 512, 2048)
DTYPES = ("bfloat16", "float32")
LEAST_COPY = 4 << 20  # bytes; of less, a copy is mostly the call
PRODUCT = 1024  # rows, columns and depth of the matrix product
TRIES = 9


def shortest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def copy_rate(size: int) -> float:
    """Bytes a second that a copy of ``size`` bytes reads and writes."""
    source = torch.ones(max(size, LEAST_COPY) // 4)
    target = torch.empty_like(source)
    return 2 * source.nbytes / shortest(lambda: target.copy_(source))


def multiply_add_rate() -> float:
    """Multiply-adds a second in float32."""
    left, right = torch.randn(2, PRODUCT, PRODUCT)
    out = torch.empty(PRODUCT, PRODUCT)
    return PRODUCT**3 / shortest(lambda: torch.mm(left, right, out=out))


def work(contexts: Sequence[Any], cell: cpu_stack.Cell) -> tuple[int, int]:
    """Bytes that all sites read and write, and their multiply-adds."""
    dtype = getattr(torch, cell.dtype)
    rows = [
        SiteRow(one.bank_slot.row, one.bank_slot.fresh, not one.site.reads_partial)
        for one in contexts
    ]
    opens = [at for at, one in enumerate(contexts) if one.position == 0]
    moved = 0
    for begin, end in pairwise([*opens, len(rows)]):
        group = rows[begin:end]
        by = traffic.two_phase_group if len(group) > 1 else traffic.single_pass_group
        moved += by(cell.tokens, group, cell.hidden, dtype)
    pairs = sum(row.row + 1 for row in rows)
    return moved, 2 * pairs * cell.tokens * cell.hidden


def calls(contexts: Sequence[Any], cell: cpu_stack.Cell) -> list[Callable[[], object]]:
    """A call for each site; random numbers, always the same."""
    torch.manual_seed(0)
    dtype, size = getattr(torch, cell.dtype), (cell.tokens, cell.hidden)
    x = torch.randn(size).to(dtype)
    bank = torch.randn(cell.tokens, contexts[0].slots, cell.hidden).to(dtype)
    norm, ones = torch.ones(cell.hidden, dtype=dtype), torch.ones(cell.hidden)
    learned = [
        SiteWeights(torch.randn(cell.hidden) / cell.hidden**0.5, ones, None, norm, 1.0, 1e-6, 1e-6)
        for _ in contexts
    ]
    behind = cell.tokens, direct.layout(cell.hidden, bank.shape[1], dtype, dtype)
    most = max(one.group for one in contexts)
    answers = torch.empty(most, *size, dtype=dtype), torch.empty(most, cell.tokens)
    run = []
    for context, site in zip(contexts, learned, strict=True):
        slot, name, arguments = context.bank_slot, "single_pass", []
        if context.group > 1:
            arguments = [one[: context.group - 1] for one in answers]
            name = "phase_2" if context.position else "phase_1"
        if name == "phase_1":
            group = learned[slot.position : slot.position + context.group]
            arguments += [*cpp.numbers(site, slot), not context.site.reads_partial]
            arguments += [[one.query for one in group], [one.key_norm for one in group], None, norm]
        elif name == "phase_2":
            arguments += [slot.number, slot.first, *cpp.arguments(site, slot)]
        else:
            arguments += cpp.arguments(site, slot)
        run.append(partial(direct.calls[name], x, bank, *arguments, *behind))
    return run


def timed(run: list[Callable[[], object]], passing: torch.Tensor) -> float:
    """Seconds of all calls together by the clock, without what passes through the caches."""
    taken = 0.0
    for call in run:
        passing.add_(1)
        begin = time.perf_counter()
        call()
        taken += time.perf_counter() - begin
    return taken


def measure(shape: Shape, tokens: int, dtype: str, rounds: int, rate: float) -> dict[str, Any]:
    """The row of a shape; ``rate`` in multiply-adds a second."""
    cell = cpu_stack.Cell(shape.hidden, tokens, shape.block, dtype, True, shape.layers)
    algorithm = "two_phase" if cell.blocks >= MANY_BLOCKS else "single_pass"  # as ``auto``
    contexts = cpu_stack.contexts_of(cell, algorithm)
    moved, multiply_adds = work(contexts, cell)
    item = getattr(torch, dtype).itemsize
    bytes_rate = copy_rate(contexts[0].slots * tokens * shape.hidden * item)
    run = calls(contexts, cell)
    passing = torch.zeros(cpu_stack.PASSING // 4)
    timed(run, passing)
    us = 1e6 * median(timed(run, passing) for _ in range(rounds))
    memory_us, arithmetic_us = 1e6 * moved / bytes_rate, 1e6 * multiply_adds / rate
    return {
        "shape": str(shape),
        "phase": "decode" if tokens < PREFILL else "prefill",
        "tokens": tokens,
        "dtype": dtype,
        "algorithm": algorithm,
        "us": us,
        "bytes": moved,
        "copy_bytes_per_s": bytes_rate,
        "memory_us": memory_us,
        "multiply_adds": multiply_adds,
        "arithmetic_us": arithmetic_us,
        "ratio": us / max(memory_us, arithmetic_us),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure every shape; a table on stderr, one JSON document on stdout."""
    about = "Cost of all sites of a model on CPU beside two bounds of this machine."
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=about, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=TRIES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    malloc.keep_freed()
    rate = multiply_add_rate()
    results = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for tokens in options.tokens:
                results.append(measure(shape, tokens, dtype, options.rounds, rate))
                print(tables.roofline(results)[-1], file=sys.stderr)
    publish(
        "kernels",
        arguments,
        options.out,
        benchmark="kernels.roofline",  # not that of a GPU, which has the same command
        config={
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "passing_bytes": cpu_stack.PASSING,
            "multiply_adds_per_s": rate,
        },
        results=results,
    )
    return 0
