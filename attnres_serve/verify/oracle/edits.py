"""The meaning of edits of the softmax over depth that hold for every token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = -1e38  # a stored bias below it masks its source


class Edit(NamedTuple):
    """An edit of a site: its kind, its sources, and their weights or the scale."""

    kind: str
    sources: Sequence[int]
    values: Sequence[float] = ()


def edited(scores: Tensor, edits: Sequence[Edit]) -> Tensor:
    """`scores` [tokens, sources] of a site after its edits, one after the other."""
    scores = scores.masked_fill(scores < LEAST, -torch.inf)
    for kind, at, values in edits:
        if kind == "mask":
            scores[:, at] = -torch.inf
        elif kind == "scale":
            scores = torch.where(scores.isfinite(), scores * values[0], scores)
        else:
            shares = torch.zeros(scores.shape[1], dtype=scores.dtype)
            shares[at] = torch.tensor(values or [1.0] * len(at), dtype=scores.dtype)
            scores = shares.log().expand_as(scores).clone()
    return scores
