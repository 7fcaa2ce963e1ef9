"""How many bytes a launch moves: everything it reads and everything it writes, each address once.

A *vector* is tokens x hidden elements of the activation dtype; docs/performance.md has the formulae
in vectors.  Queries and norm weights, taken to be in the activation dtype, are counted too.  What
caches serve again is not.
"""

import torch

_FLOAT32 = 4


def single_pass(tokens: int, blocks: int, hidden: int, dtype: torch.dtype, *, fresh: bool) -> int:
    """One site on one launch; ``blocks`` rows besides the partial sum's, that is its ``row``."""
    vectors = blocks + (3 if fresh else 4)  # delta, old sum (not fresh); new sum, result
    return vectors * tokens * hidden * dtype.itemsize + _query_and_weight(hidden, dtype)


def inter_block(tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype) -> int:
    """Phase 1: rows and queries in, answers and log-sum-exps out."""
    vectors = blocks + sites
    small = sites * (hidden + tokens) * _FLOAT32
    return vectors * tokens * hidden * dtype.itemsize + small


def merge(tokens: int, hidden: int, dtype: torch.dtype, *, fresh: bool) -> int:
    """Phase 2 of one site."""
    vectors = 4 if fresh else 5  # delta, answer, old sum (not fresh); new sum, result
    small = tokens * _FLOAT32 + _query_and_weight(hidden, dtype)
    return vectors * tokens * hidden * dtype.itemsize + small


def norm_answer(tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """The result of a block's first site: answer in, result out."""
    return (2 * tokens + 1) * hidden * dtype.itemsize


def complete_row(tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """The addition that completes a block before phase 1: delta and old sum in, new sum out."""
    return 3 * tokens * hidden * dtype.itemsize


def single_pass_block(tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype) -> int:
    """All sites of a block; the first completes the last of the ``blocks``, the second begins."""
    total = single_pass(tokens, blocks - 1, hidden, dtype, fresh=False)
    for later in range(sites - 1):
        total += single_pass(tokens, blocks, hidden, dtype, fresh=later == 0)
    return total


def two_phase_block(tokens: int, blocks: int, sites: int, hidden: int, dtype: torch.dtype) -> int:
    """The same sites by ``complete_row``, ``inter_block``, ``norm_answer`` and merges."""
    total = complete_row(tokens, hidden, dtype)
    total += inter_block(tokens, blocks, sites, hidden, dtype)
    total += norm_answer(tokens, hidden, dtype)
    for later in range(sites - 1):
        total += merge(tokens, hidden, dtype, fresh=later == 0)
    return total


def _query_and_weight(hidden: int, dtype: torch.dtype) -> int:
    return hidden * (_FLOAT32 + dtype.itemsize)
