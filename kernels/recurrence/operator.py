"""The one function of this room, by the code that the machine has for it."""

import torch
from torch import Tensor

from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.recurrence import in_torch


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    slots: Tensor,
    starts: Tensor,
    has_history: Tensor,
    scale: float,
) -> Tensor:
    """Run a ragged batch of sequences through one layer's state, token by token.

    A head's state ``S`` is a matrix ``[V, K]``.  A token does, in this order::

        S <- S * decay                            a factor for each column
        S <- S + beta * (v - S k) k^T             the delta rule; with beta None: S + v k^T
        o  = scale * S q

    Kimi Delta Attention has a decay for each channel, Gated DeltaNet one for each head, lightning
    attention one for each head that never changes, and no delta rule.  Whatever comes before and
    behind it is the layer's: gates, convolutions, norms.

    ``T`` tokens, ``H`` heads, ``K`` and ``V`` their sizes, ``N`` sequences.

    Args:
        q: ``[T, G, K]`` in float32, bfloat16 or float16.  ``G`` divides ``H``: so many heads in a
            row share a query and a key.
        k: ``[T, G, K]`` in the dtype of ``q``.
        v: ``[T, H, V]`` in float32, bfloat16 or float16.
        decay: float32, broadcast to ``[T, H, K]``: the factor itself, not its logarithm.
        beta: ``[T, H]`` float32, or None.
        state: vLLM's cache ``[blocks, H, V, K]`` in float32, bfloat16 or float16, written in place.
            Each block is contiguous.  Between two tokens of one call it stays float32 (float64
            where ``q`` is float64, which only the code in torch takes).
        slots: ``[N]`` integers, each sequence's block.  vLLM's blocks 0 and -1 stand for padding:
            such a sequence is left out, its outputs are zero.
        starts: ``[N + 1]`` integers: sequence ``n`` has the tokens from ``starts[n]`` up to
            ``starts[n + 1]``.  Tokens behind the last are padding, their outputs zero.
        has_history: ``[N]`` bool; without history a sequence begins from zeros, whatever its block
            holds.
        scale: factor of the outputs.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    """
    batch = slots, starts, has_history
    if not cpp.is_ready() or q.dtype == torch.float64:
        return in_torch.recurrence(q, k, v, decay, beta, state, *batch, scale)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    decay = decay.expand(*v.shape[:2], q.shape[-1])
    torch.ops.attnres_serve.cpp_recurrence(q, k, v, decay, beta, state, *batch, scale, out)
    return out
