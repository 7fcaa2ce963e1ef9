"""The shapes at which kernels are measured: which there are, their order, what does not fit.

A cell is a block of ``sites`` sites in front of which ``blocks`` rows are finished, or nearly: the
output that arrives at the first site completes the last of them, the second site begins the partial
sum and the others add to it.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEY_EPS = NORM_EPS = 1e-6  # one number, because some implementations have one for both
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 16384)
BLOCKS = (1, 2, 4, 6, 9)
HIDDEN = (768, 1024, 2048, 4096, 7168)
SITES = (2, 8, 24)
# What others are compared at, and so what is measured first.
CENTRE_HIDDEN, CENTRE_SITES = (4096, 7168), 8


class Cell(NamedTuple):
    """A shape.

    Attributes:
        tokens: T.
        blocks: n, finished blocks.
        hidden: d.
        sites: S, sites of the block.
    """

    tokens: int
    blocks: int
    hidden: int
    sites: int

    def __str__(self) -> str:
        return f"T={self.tokens} n={self.blocks} d={self.hidden} S={self.sites}"


# For the gate in Triton's interpreter: odd sizes, and a hidden size that is no power of two.
TINY = (Cell(1, 1, 64, 2), Cell(5, 3, 96, 3), Cell(3, 4, 65, 4))


def grid(
    tokens: Iterable[int], blocks: Iterable[int], hidden: Iterable[int], sites: Iterable[int]
) -> list[Cell]:
    """Every combination, those where others are compared first."""
    cells = [Cell(*shape) for shape in product(tokens, blocks, hidden, sites)]
    return sorted(cells, key=_order)


def _order(cell: Cell) -> tuple:
    centre = cell.sites == CENTRE_SITES, cell.hidden in CENTRE_HIDDEN
    return (*(not at for at in centre), cell.hidden, cell.sites, cell.blocks, cell.tokens)


def footprint(cell: Cell, contenders: int, dtype: torch.dtype) -> int:
    """Bytes of memory that a cell takes at most.

    Contenders share the sublayers' outputs.  Each has separate sources, and room for the answers of
    a phase 1 and for a few results.  The gate's float64 result and the reference's largest
    intermediate come on top.
    """
    vector = cell.tokens * cell.hidden
    vectors = cell.blocks + 1 + cell.sites + 4
    gate = 8 * (vector + 6 * (cell.blocks + 1) * min(cell.tokens, GATE_TOKENS) * cell.hidden)
    return (cell.sites + cell.blocks + contenders * vectors) * vector * dtype.itemsize + 2 * gate


GATE_TOKENS = 2048  # that the reference is computed for at a time


class Inputs(NamedTuple):
    """Tensors that the sites of a cell work on; read only.

    Attributes:
        cell: the shape.
        blocks: ``[n, T, d]`` rows before the block; the last is completed by ``deltas[0]``.
        deltas: ``[S, T, d]`` outputs of the sublayers, one in front of every site.
        queries: ``[S, d]`` float32 folded pseudo-queries.
        norm_weight: ``[d]`` weight of the norm behind the mix.
    """

    cell: Cell
    blocks: Tensor
    deltas: Tensor
    queries: Tensor
    norm_weight: Tensor

    def bank(self) -> Tensor:
        """A new bank ``[T, n + 1, d]``: the blocks, then a row for the partial sum."""
        count, tokens, hidden = self.blocks.shape
        bank = self.blocks.new_zeros((tokens, count + 1, hidden))
        bank[:, :count] = self.blocks.transpose(0, 1)
        return bank


def draw(cell: Cell, device: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs of a cell, the same for the same seed; scores have a deviation of about two."""
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device}
    rows = cell.tokens, cell.hidden
    blocks = torch.empty((cell.blocks, *rows), device=device, dtype=dtype)
    deltas = torch.empty((cell.sites, *rows), device=device, dtype=dtype)
    blocks.normal_(generator=generator)
    deltas.normal_(generator=generator)
    queries = 2 * cell.hidden**-0.5 * torch.randn((cell.sites, cell.hidden), **options)
    norm_weight = (1 + 0.3 * torch.randn(cell.hidden, **options)).to(dtype)
    return Inputs(cell, blocks, deltas, queries, norm_weight)


def split_by_memory(
    cells: Sequence[Cell],
    contenders: int,
    dtype: torch.dtype,
    free_bytes: int,
) -> tuple[list[Cell], list[Cell]]:
    """The cells that fit into so much memory with as many contenders, and those that do not."""
    fits = {cell: footprint(cell, contenders, dtype) <= free_bytes for cell in cells}
    return [cell for cell in cells if fits[cell]], [cell for cell in cells if not fits[cell]]
