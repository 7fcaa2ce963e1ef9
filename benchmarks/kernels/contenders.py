"""Table of the implementations that are measured, ours and those of other projects.

To add one, write a function that takes ``Inputs`` and returns a ``Run``, and name it in
``CONTENDERS``; the gate, the measurement and the report need nothing else.  One that moves other
bytes than the algorithms there are is also a line in ``algorithm_bytes``.  Ours all work on a bank
``[T, n + 1, d]``; the others have the layout that they are made for, so that nothing is copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels import reference
from benchmarks.kernels import traffic
from benchmarks.kernels.cells import CENTRE_HIDDEN, CENTRE_SITES, KEY_EPS, NORM_EPS, Cell, Inputs

EPS = {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}
BASELINE = "add_rms_norm"


@dataclass
class Run:
    """A contender on the inputs of a cell, ready to be called.

    Attributes:
        sites: one function per site, to be called in order; each returns its normed mix ``[T, d]``.
        own: the partial sum ``[T, d]`` (of the residual baseline, the sum) after those sites that
            have run.
        reset: undo what the sites wrote to their sources, so that they can be called again.
        poison: what the sites must overwrite before they read it.
    """

    sites: list[Callable[[], Tensor]]
    own: Callable[[], Tensor]
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
        where: at which cells it runs unless all are asked for, in words.
        runs_at: the same, as a function.
        ours: whether a failure of it is a failure of this project.
    """

    start: Callable[[Inputs], Run]
    algorithm: str
    roundings: int
    fused: str
    where: str = "every cell"
    runs_at: Callable[[Cell], bool] = lambda cell: True
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

    bank, out = inputs.bank(), torch.empty_like(inputs.deltas[0])

    def site(index: int) -> Tensor:
        return triton_single_pass.single_pass(
            inputs.deltas[index],
            bank,
            inputs.queries[index],
            inputs.norm_weight,
            **_slot(inputs.cell, index),
            out=out,
            **EPS,
        )

    return _on_bank(inputs, bank, site, (out,))


def two_phase(inputs: Inputs) -> Run:
    from attnres_serve.kernels.triton import phase_1, phase_2

    bank, out = inputs.bank(), torch.empty_like(inputs.deltas[0])
    tokens, _, hidden, sites = inputs.cell
    # As ``phase_1`` allocates them.
    answers = out.new_empty((tokens, sites - 1, hidden)).transpose(0, 1)
    log_sums = inputs.queries.new_empty((tokens, sites - 1)).t()

    def site(index: int) -> Tensor:
        delta, weight, slot = inputs.deltas[index], inputs.norm_weight, _slot(inputs.cell, index)
        if index == 0:
            results = out, answers, log_sums
            phase_1.phase_1(
                delta, bank, inputs.queries, weight, **slot, completes=True, out=results, **EPS
            )
            return out
        known = answers, log_sums, inputs.queries[index], weight
        return phase_2.phase_2(delta, bank, *known, **slot, position=index - 1, out=out, **EPS)

    return _on_bank(inputs, bank, site, (out, answers, log_sums))


def _slot(cell: Cell, index: int) -> dict[str, Any]:
    """The bank row that the output before a site of a block belongs to, and whether it begins
    that row."""
    row = cell.blocks - (index == 0)
    return {"row": row, "fresh": index == 1}


def _on_bank(
    inputs: Inputs, bank: Tensor, site: Callable[[int], Tensor], written: Sequence[Tensor]
) -> Run:
    """The sites of an implementation that keeps its sources in one bank."""
    last = inputs.cell.blocks
    rows = {"now": last - 1}

    def call(index: int) -> Tensor:
        rows["now"] = last - 1 if index == 0 else last
        return site(index)

    return Run(
        [lambda index=index: call(index) for index in range(inputs.cell.sites)],
        own=lambda: bank[:, rows["now"]],
        reset=lambda: bank[:, last - 1].copy_(inputs.blocks[-1]),
        poison=(*written, bank[:, last]),
    )


def compiled_reference(inputs: Inputs) -> Run:
    """``reference.site`` on separate tensors, one graph per site."""
    step = compiled(_reference_site)
    blocks = list(inputs.blocks)
    state: dict[str, Tensor] = {"own": blocks[-1], "completed": blocks[-1]}

    def site(index: int) -> Tensor:
        result, state["own"] = step(
            inputs.deltas[index],
            None if index == 1 else state["own"],
            blocks[:-1] if index == 0 else [*blocks[:-1], state["completed"]],
            inputs.queries[index],
            inputs.norm_weight,
        )
        if index == 0:
            state["completed"] = state["own"]
        return result

    return Run(
        [lambda index=index: site(index) for index in range(inputs.cell.sites)],
        own=lambda: state["own"],
        reset=lambda: state.update(own=blocks[-1]),
    )


def add_rms_norm(inputs: Inputs) -> Run:
    """A standard residual: the same outputs added to one sum, which is normed."""
    step = compiled(add_and_norm)
    total = inputs.blocks[-1].clone()

    def site(index: int) -> Tensor:
        return step(inputs.deltas[index], total, inputs.norm_weight)

    return Run(
        [lambda index=index: site(index) for index in range(inputs.cell.sites)],
        own=lambda: total,
        reset=lambda: total.copy_(inputs.blocks[-1]),
    )


def _reference_site(
    delta: Tensor, partial: Tensor | None, blocks: list[Tensor], query: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.site(delta, partial, blocks, query, weight, KEY_EPS, NORM_EPS)


def add_and_norm(delta: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    """A standard residual in front of a sublayer; ``total`` is updated in place."""
    total.add_(delta)
    return reference.rms_norm(total.float(), weight, NORM_EPS).to(total.dtype)


_COMPILED: dict[Callable, Callable] = {}


def compiled(function: Callable) -> Callable:
    """Compiled for every shape by itself, as a server with fixed shapes would have it."""
    if function not in _COMPILED:
        # One function meets every cell; the default limit of 8 shapes ends in an error.
        torch._dynamo.config.recompile_limit = 4096
        torch._dynamo.config.accumulated_recompile_limit = 4096
        _COMPILED[function] = torch.compile(function, dynamic=False, fullgraph=True)
    return _COMPILED[function]


def at_centre(cell: Cell) -> bool:
    return cell.sites == CENTRE_SITES and cell.hidden in CENTRE_HIDDEN


def sampled(cell: Cell) -> bool:
    return at_centre(cell) and cell.hidden == 4096 and cell.blocks in (4, 9)


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
    "compiled_reference": Contender(
        compiled_reference,
        "single_pass",
        1,
        "torch.compile of kernels/reference.py: what inductor makes of a site",
        "S = 8, d = 4096, n in 4, 9, T in 1, 128, 8192",
        lambda cell: sampled(cell) and cell.tokens in (1, 128, 8192),
    ),
}
