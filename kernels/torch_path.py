"""Depth attention in plain torch: what runs on CPU, eager or fused by inductor.

The functions never write to their arguments, so a compiler sees every read and has no reason to
copy a block.  Scores, softmax and mixing are in float32, the RMSNorm is applied to the float32 mix,
and the result is rounded once to the activation dtype.

Shapes: ``T`` tokens, ``d`` hidden size, ``n`` sources, ``S`` sites that share a phase 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["inter_block", "merge", "rms_norm", "single_pass"]


def single_pass(
    sources: Sequence[Tensor], query: Tensor, key_eps: float, norm_weight: Tensor, norm_eps: float
) -> Tensor:
    """Attend to all sources at once and norm the mix; see ``reference.mix``.

    Args:
        sources: ``n`` tensors ``[T, d]`` of one dtype: the finished blocks, then the partial sum.
        query: ``[d]`` float32 pseudo-query times key-norm weight.
        key_eps: epsilon of the key norm.
        norm_weight, norm_eps: weight ``[d]`` and epsilon of the norm behind the mix.

    Returns:
        ``[T, d]`` in the dtype of the sources.
    """
    stacked = torch.stack(tuple(sources), dim=1).float()
    weights = torch.softmax(_scores(stacked, query, key_eps), dim=1)
    mixed = (weights.unsqueeze(-1) * stacked).sum(1)
    return rms_norm(mixed, norm_weight, norm_eps, sources[0].dtype)


def inter_block(
    blocks: Sequence[Tensor], queries: Sequence[Tensor], key_eps: float
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Phase 1 of two-phase: ``S`` sites attend to the finished blocks in one pass over them.

    Args:
        blocks: ``n`` tensors ``[T, d]`` of one dtype.
        queries: ``S`` tensors ``[d]``, float32, folded.
        key_eps: epsilon of the key norm.

    Returns:
        Per site the answer ``[T, d]`` and its log-sum-exp ``[T]``, both float32.
    """
    stacked = torch.stack(tuple(blocks), dim=1).float()
    scale = torch.rsqrt(stacked.square().mean(-1, keepdim=True) + key_eps)
    logits = (stacked @ torch.stack(tuple(queries), dim=1)) * scale
    log_sums = torch.logsumexp(logits, dim=1)
    answers = torch.bmm(torch.exp(logits - log_sums.unsqueeze(1)).transpose(1, 2), stacked)
    return tuple(zip(answers.unbind(1), log_sums.unbind(1), strict=True))


def merge(
    answer: Tensor,
    log_sum: Tensor,
    partial: Tensor,
    query: Tensor,
    key_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
) -> Tensor:
    """Phase 2 of two-phase: merge the partial sum by online softmax and norm the mix.

    Args:
        answer: ``[T, d]`` float32, this site's answer of phase 1.
        log_sum: ``[T]`` float32, its log-sum-exp.
        partial: ``[T, d]`` running partial sum in the activation dtype.
        query, key_eps, norm_weight, norm_eps: as in ``single_pass``.

    Returns:
        ``[T, d]`` in the dtype of ``partial``.
    """
    own = partial.float()
    weight = torch.sigmoid(_scores(own, query, key_eps) - log_sum).unsqueeze(-1)
    return rms_norm(answer + weight * (own - answer), norm_weight, norm_eps, partial.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm of ``x`` in float32, rounded once to ``dtype`` (that of ``x`` where it is None)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(dtype or x.dtype)


def _scores(x: Tensor, query: Tensor, eps: float) -> Tensor:
    return (x * query).sum(-1) * torch.rsqrt(x.square().mean(-1) + eps)
