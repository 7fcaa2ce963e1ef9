"""How many bytes a launch moves: everything it reads and everything it writes, each address once.

A *vector* is tokens x hidden elements of the activation dtype; docs/measure/bytes.md has the
formulae in vectors.  Queries and norm weights, taken to be in the activation dtype, are counted
too.  What caches serve again is not: a row that a program reads once more for other sites, or that
it reads back after writing it.

The functions of launches come first, then those of groups of sites, for which a plan can be made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

_FLOAT32 = 4


class SiteRow(NamedTuple):
    """What a site does to the bank.

    Attributes:
        row: the row it adds to, and the number of finished rows before it.
        fresh: whether that row begins here.
        completes: whether it is a finished block from here on.
    """

    row: int
    fresh: bool = False
    completes: bool = False


def single_pass(tokens: int, blocks: int, hidden: int, dtype: torch.dtype, *, fresh: bool) -> int:
    """One site on one launch; ``blocks`` rows besides the partial sum's, that is its ``row``."""
    vectors = blocks + (3 if fresh else 4)  # delta, old sum (not fresh); new sum, result
    return _bytes(vectors, tokens, hidden, dtype) + _query_and_weight(hidden, dtype)


def phase_1(
    tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype, *, fresh: bool
) -> int:
    """The first site on top of ``blocks`` rows, and phase 1 of the ``sites - 1`` later ones."""
    vectors = blocks + sites + (2 if fresh else 3)  # delta, old sum (not fresh); new sum
    small = (sites * hidden + (sites - 1) * tokens) * _FLOAT32 + _bytes(1, 1, hidden, dtype)
    return _bytes(vectors, tokens, hidden, dtype) + small


def score_group(
    tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype, *, fresh: bool
) -> int:
    """The first of three launches of a group of many tokens: logits of all rows, for all sites."""
    vectors = blocks + (2 if fresh else 3)  # delta, old sum (not fresh); new sum
    small = sites * (hidden + (blocks + 1) * tokens) * _FLOAT32
    return _bytes(vectors, tokens, hidden, dtype) + small


def weigh_group(tokens: int, blocks: int, sites: int, *, completes: bool) -> int:
    """The second: logits in; weights, in sixteens of sites, and log-sum-exps out."""
    read = sites * blocks + (sites if completes else 1)  # not all read the row the first has made
    written = -(-sites // 16) * 16 * (blocks + 1) + sites - 1
    return (read + written) * tokens * _FLOAT32


def mix_group(
    tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype, *, completes: bool
) -> int:
    """The third: rows and weights in, which are read in eights; the result and the answers out."""
    read = -(-(sites - 1) // 8) * 8
    weights = max(read, sites) * blocks + (max(read, sites) if completes else 1)
    small = weights * tokens * _FLOAT32 + _bytes(1, 1, hidden, dtype)
    return _bytes(blocks + 1 + sites, tokens, hidden, dtype) + small


def phase_2(tokens: int, hidden: int, dtype: torch.dtype, *, fresh: bool, late: int = 0) -> int:
    """Phase 2 of one site, which reads ``late`` rows that were finished after phase 1."""
    vectors = late + (4 if fresh else 5)  # delta, answer, old sum (not fresh); new sum, result
    small = tokens * _FLOAT32 + _query_and_weight(hidden, dtype)
    return _bytes(vectors, tokens, hidden, dtype) + small


def single_pass_group(tokens: int, rows: Sequence[SiteRow], hidden: int, dtype: torch.dtype) -> int:
    """A single pass at every site."""
    return sum(single_pass(tokens, site.row, hidden, dtype, fresh=site.fresh) for site in rows)


def two_phase_group(tokens: int, rows: Sequence[SiteRow], hidden: int, dtype: torch.dtype) -> int:
    """``phase_1`` at the first site, and at every later one a merge.

    A merge reads the rows that were finished since, if the group spans several blocks.
    """
    opens = rows[0]
    total = phase_1(tokens, opens.row, len(rows), hidden, dtype, fresh=opens.fresh)
    answered = opens.row + opens.completes
    for site in rows[1:]:
        late = site.row - answered
        total += phase_2(tokens, hidden, dtype, fresh=site.fresh, late=late)
    return total


def block_rows(blocks: int, sites: int) -> list[SiteRow]:
    """A block of sites: the first completes the last of ``blocks`` rows, the second begins one."""
    first = SiteRow(blocks - 1, completes=True)
    return [first, *(SiteRow(blocks, fresh=later == 0) for later in range(sites - 1))]


def _query_and_weight(hidden: int, dtype: torch.dtype) -> int:
    return hidden * _FLOAT32 + _bytes(1, 1, hidden, dtype)


def _bytes(vectors: int, tokens: int, hidden: int, dtype: torch.dtype) -> int:
    itemsize: int = dtype.itemsize
    return vectors * tokens * hidden * itemsize
