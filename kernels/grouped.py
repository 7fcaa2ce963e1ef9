"""Rows times the matrices of their groups, as experts are computed on CPU."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from attnres_serve.kernels.cpp import backend as cpp


def grouped_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """``weight[g] x[n]`` for each row ``n`` of a group ``g``, ``[N, o]`` float32.

    Args:
        x: ``[N, d]`` float32, group by group.
        weight: ``[G, o, d]`` in float32, bfloat16 or float16.
        starts: ``[G + 1]`` int64: group ``g`` has the rows from ``starts[g]`` up to
            ``starts[g + 1]``, and together they have all.
    """
    out = x.new_empty(len(x), weight.shape[1])
    if cpp.is_ready():
        torch.ops.attnres_serve.cpp_grouped_linear(x, weight, starts, out)
        return out
    for matrix, (begin, end) in zip(weight, pairwise(starts.tolist()), strict=True):
        if begin < end:
            out[begin:end] = linear(x[begin:end], matrix.float())
    return out
