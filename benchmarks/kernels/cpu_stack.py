"""Cost of all sites of a model on CPU, outside any engine: single pass and two-phase.

    python -m benchmarks.kernels.cpu_stack --out benchmarks/results/cpu-stack.json

Nanoseconds of a site and token: the sites of 24 layers run one after the other on one bank, by the
plan that a served model has.  The algorithms take turns, round after round, and the ratio is taken
within a round.  It is the processor time of one thread, which what else the machine does changes
little.  *Cold*: before each site 8 MiB pass through the caches, which is not timed, as sublayers
do.  The last line on stdout is one JSON document; the table goes to stderr.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from attnres_serve.depth.groups import most_sites
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import BankBackend, SiteWeights
from attnres_serve.model.stage import site_contexts
from benchmarks.common import spread
from benchmarks.kernels import one_thread
from benchmarks.published import tables

LAYERS = 24
ALGORITHMS = ("single_pass", "two_phase")
PASSING = 8 << 20  # bytes


class Cell(NamedTuple):
    """A model's sites; ``block`` in sublayers, 1 is Full AttnRes."""

    hidden: int
    tokens: int
    block: int
    dtype: str = "bfloat16"
    cold: bool = False
    layers: int = LAYERS

    @property
    def blocks(self) -> int:
        return 2 * self.layers // self.block


CELLS = (
    *(Cell(256, 512, block) for block in (1, 2, 3, 6)),
    *(Cell(1024, 512, block) for block in (1, 2, 3, 6)),
    Cell(2048, 512, 1),
    Cell(2048, 512, 6),
    Cell(256, 2048, 1),
    Cell(256, 2048, 2),
    Cell(256, 2048, 6),
    Cell(256, 512, 1, "float32"),
    Cell(1024, 512, 1, "float32"),
    Cell(256, 512, 1, cold=True),
    Cell(1024, 512, 1, cold=True),
    Cell(1024, 512, 6, cold=True),
    Cell(256, 1, 1),
    Cell(256, 8, 1),
    Cell(256, 128, 1),
)


def contexts_of(cell: Cell, algorithm: str) -> list[Any]:
    """Contexts of a served model's sites, without that of the first, which mixes nothing."""
    cpp: Any = backends.load("cpp")
    spec = AttnResSpec.uniform(Layout.of(cell.layers), cell.block, 1e-6)
    itemsize = getattr(torch, cell.dtype).itemsize
    most = most_sites(cell.tokens, cell.hidden, itemsize, in_place=True)
    return site_contexts(list(sites(spec)), algorithm, cpp, most, True, 1)[1:]


def calls(cell: Cell, algorithm: str) -> tuple[list[Callable[[], object]], torch.Tensor]:
    """A call for each site, and what each takes and leaves; random numbers, always the same."""
    cpp: Any = backends.load("cpp")
    torch.manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    contexts = contexts_of(cell, algorithm)
    x = torch.randn(cell.tokens, cell.hidden).to(dtype)
    bank = torch.randn(cell.tokens, contexts[0].slots, cell.hidden).to(dtype)
    norm = torch.ones(cell.hidden, dtype=dtype)
    learned = [
        SiteWeights(
            torch.randn(cell.hidden) / cell.hidden**0.5,
            *(torch.ones(cell.hidden), None, norm, 1.0, 1e-6, 1e-6),
        )
        for _ in contexts
    ]
    answers: list[Any] = [None]
    run = [
        _call(cpp, context, x, bank, learned, weights, answers)
        for context, weights in zip(contexts, learned, strict=True)
    ]
    return run, x


def _call(
    cpp: BankBackend,
    context: Any,
    x: torch.Tensor,
    bank: torch.Tensor,
    queries: list[SiteWeights],
    weights: SiteWeights,
    answers: list[Any],
) -> Callable[[], object]:
    site = queries, weights, context.bank_slot
    if context.group == 1:
        return lambda: cpp.single_pass(x, bank, *site)
    if context.position:
        return lambda: cpp.phase_2(x, bank, answers[0], *site)
    group = queries, context.group, weights, context.bank_slot, not context.site.reads_partial

    def opened() -> None:
        answers[0] = cpp.phase_1(x, bank, *group)[1]

    return opened


def timed(run: list[Callable[[], object]], passing: torch.Tensor | None) -> float:
    """Seconds of all calls together, without what passes through the caches."""
    taken = 0.0
    for call in run:
        if passing is not None:
            passing.add_(1)
        begin = time.thread_time()
        call()
        taken += time.thread_time() - begin
    return taken


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """The row of a cell."""
    passing = torch.zeros(PASSING // 4) if cell.cold else None
    runs = {name: partial(timed, calls(cell, name)[0], passing) for name in ALGORITHMS}
    times = one_thread.in_turn(runs, max(1, 256 // cell.tokens), rounds)
    count = cell.tokens * 2 * cell.layers
    ratios = [one["two_phase"] / one["single_pass"] for one in times]
    return {
        **cell._asdict(),
        "blocks": cell.blocks,
        "nanoseconds": {
            name: spread([1e9 * one[name] / count for one in times]) for name in ALGORITHMS
        },
        "ratio": spread(ratios),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure every cell and print one JSON document."""
    about = __doc__.partition("\n")[0]
    return one_thread.run(
        "kernels.cpu_stack", about, arguments, CELLS, measure, tables.stacks, LAYERS
    )


if __name__ == "__main__":
    sys.exit(main())
