"""Table of the implementations that are measured, ours and those of other projects.

To add one, write a function that takes ``Inputs`` and returns a ``Run``, and name it in
``CONTENDERS``; the gate, the measurement and the report need nothing else.  One that moves other
bytes than the algorithms there are is also a line in ``algorithm_bytes``.  Ours all work on a bank
``[T, n + 1, d]``; the others have the layout that they are made for, so that nothing is copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels import reference
from benchmarks.kernels import traffic
from benchmarks.kernels.cells import KEY_EPS, NORM_EPS, Cell, Inputs

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}
BASELINE = "add_rms_norm"


@dataclass
class Run:
    """A contender on the inputs of a cell, ready to be called.

    Attributes:
        sites: one function per site, to be called in order; each returns its normed mix ``[T, d]``.
        partial_sum: ``[T, d]``, after those sites that have run; of the residual baseline, the sum.
        reset: undo what the sites wrote to their sources, so that they can be called again.
        poison: what the sites must overwrite before they read it.
    """

    sites: list[Callable[[], Tensor]]
    partial_sum: Callable[[], Tensor]
    reset: Callable[[], None]
    poison: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Contender:
    """An implementation.

    Attributes:
        start: makes a ``Run``; imports what it needs and raises where that is missing.
        algorithm: ``single_pass``, ``two_phase`` or ``residual``: what it computes, and whose bytes
            are its floor.
        roundings: to the activation dtype between the sources and the result, besides the last.
        fused: what is one launch, and what is beside it.
        ours: whether a failure of it is a failure of this project.
    """

    start: Callable[[Inputs], Run]
    algorithm: str
    roundings: int
    fused: str
    ours: bool = False


def algorithm_bytes(algorithm: str, cell: Cell, dtype: torch.dtype) -> int:
    """Bytes that a block's sites read and write at least, by ``benchmarks/kernels/traffic.py``.

    A standard residual, which is not in that table, reads the sublayer's output, the sum and the
    weight, and writes the sum and the result.
    """
    tokens, blocks, hidden, sites = cell
    if algorithm == "residual":
        return sites * (4 * tokens + 1) * hidden * dtype.itemsize
    shape = tokens, traffic.block_rows(blocks, sites), hidden, dtype
    count = {"single_pass": traffic.single_pass_group, "two_phase": traffic.two_phase_group}
    return count[algorithm](*shape)


def single_pass(inputs: Inputs) -> Run:
    from attnres_serve.kernels.triton import single_pass as triton_single_pass

    bank = inputs.bank()

    def site(index: int) -> Tensor:
        return triton_single_pass.single_pass(
            inputs.deltas[index],
            bank,
            inputs.queries[index],
            inputs.norm_weight,
            **_slot(inputs.cell, index),
            **EPS,
        )

    return _on_bank(inputs, bank, site)


def two_phase(inputs: Inputs) -> Run:
    from attnres_serve.kernels.triton import phase_1, phase_2

    bank = inputs.bank()
    answers: list[Tensor] = []

    def site(index: int) -> Tensor:
        delta, weight, slot = inputs.deltas[index], inputs.norm_weight, _slot(inputs.cell, index)
        if index == 0:
            out, *answers[:] = phase_1.phase_1(
                delta, bank, inputs.queries, weight, **slot, completes=True, **EPS
            )
            return out
        known = *answers, inputs.queries[index], weight
        return phase_2.phase_2(delta, bank, *known, **slot, position=index - 1, **EPS)

    return _on_bank(inputs, bank, site)


def _slot(cell: Cell, index: int) -> dict[str, Any]:
    """The bank row that the output before a site of a block belongs to, and whether it begins
    that row."""
    row = cell.blocks - (index == 0)
    return {"row": row, "fresh": index == 1}


def _on_bank(inputs: Inputs, bank: Tensor, site: Callable[[int], Tensor]) -> Run:
    """The sites of an implementation that keeps its sources in one bank."""
    last = inputs.cell.blocks
    rows = {"now": last - 1}

    def call(index: int) -> Tensor:
        rows["now"] = last - 1 if index == 0 else last
        return site(index)

    return Run(
        [lambda index=index: call(index) for index in range(inputs.cell.sites)],
        partial_sum=lambda: bank[:, rows["now"]],
        reset=lambda: bank[:, last - 1].copy_(inputs.blocks[-1]),
        poison=(bank[:, last],),
    )


def add_rms_norm(inputs: Inputs) -> Run:
    """A standard residual: the same outputs added to one sum, which is normed."""
    step = compiled(add_and_norm)
    total = inputs.blocks[-1].clone()

    def site(index: int) -> Tensor:
        return step(inputs.deltas[index], total, inputs.norm_weight)

    return Run(
        [lambda index=index: site(index) for index in range(inputs.cell.sites)],
        partial_sum=lambda: total,
        reset=lambda: total.copy_(inputs.blocks[-1]),
    )


def add_and_norm(delta: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    """A standard residual in front of a sublayer; ``total`` is updated in place."""
    total.add_(delta)
    return reference.rms_norm(total.float(), weight, NORM_EPS).to(total.dtype)


@cache
def compiled(function: Callable) -> Callable:
    """Compiled for every shape by itself, as a server with fixed shapes would have it."""
    # One function meets every cell; the default limit of 8 shapes ends in an error.
    torch._dynamo.config.recompile_limit = 4096
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(function, dynamic=False, fullgraph=True)


CONTENDERS: dict[str, Contender] = {
    "single_pass": Contender(
        single_pass,
        "single_pass",
        0,
        "addition, row write, mix, norm: one launch a site",
        ours=True,
    ),
    "two_phase": Contender(
        two_phase,
        "two_phase",
        1,
        "first site: phase 1; later ones: phase 2; one launch a site",
        ours=True,
    ),
    BASELINE: Contender(
        add_rms_norm, "residual", 1, "torch.compile of addition in place and RMSNorm: one kernel"
    ),
}
