"""Experts with Kimi K3's activation on CPU."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from attnres_serve.kernels.cpp import backend as cpp


def situ_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shares: Tensor,
    ids: Tensor,
    beta: float,
    clip: float | None,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, ``[T, d]`` float32.

    Args:
        x: ``[T, d]`` in float32, bfloat16 or float16.
        gate_up: ``[E, 2 i, d]`` of the same dtype, the gate's rows first.
        down: ``[E, d, i]`` of the same dtype.
        shares: ``[T, top_k]`` float32, the weights of the sum.
        ids: ``[T, top_k]`` int64, the chosen experts; -1 for one of another worker.
        beta: the bound of the gate.
        clip: that of what it gates; None for none.
    """
    if cpp.is_ready(x.dtype):
        out = x.new_empty(x.shape, dtype=torch.float32)
        arguments = x.contiguous(), gate_up, down, shares.contiguous(), ids.contiguous()
        torch.ops.attnres_serve.cpp_situ_experts(*arguments, beta, clip or 0.0, out)
        return out
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        hidden = situ(linear(x[tokens].float(), gate_up[expert].float()), beta, clip)
        y = linear(hidden, down[expert].float()) * shares[tokens, places, None]
        out.index_add_(0, tokens, y)
    return out


def situ(gate_up: Tensor, beta: float, clip: float | None) -> Tensor:
    """``beta tanh(g / beta) sigmoid(g) * clip tanh(u / clip)`` of g and u side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    bounded = beta * torch.tanh(gate / beta)
    if clip is not None:
        up = clip * torch.tanh(up / clip)
    return bounded * torch.sigmoid(gate) * up
