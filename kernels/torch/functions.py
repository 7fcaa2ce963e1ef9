"""Depth attention in plain torch: what runs on CPU, eager or fused by inductor.

The functions never write to their arguments, so a compiler sees every read and has no reason to
copy a block.  Scores, softmax and mixing are in float32, the RMSNorm is applied to the float32 mix,
and the result is rounded once to the activation dtype.

Each has two forms of the same arithmetic.  *Unrolled*, a sum over separate tensors, is what a
compiler wants: inductor fuses it without a copy and computes the scores of a finished block for all
later sites while it writes the block.  *Stacked*, a few calls on one tensor, is what eager mode
wants, and what a compiler gets beyond ``MAX_UNROLLED`` sources, where unrolled graphs compile too
slowly.

Shapes: ``T`` tokens, ``d`` hidden size, ``n`` sources, ``S`` sites that share a phase 1.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

__all__ = ["mix", "phase_1", "phase_2", "rms_norm", "single_pass"]

MAX_UNROLLED = 16
Tensors = Sequence[Tensor]
Answers = tuple[tuple[Tensor, Tensor], ...]


def single_pass(
    sources: Sequence[Tensor],
    query: Tensor,
    key_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend to all sources at once and norm the mix; see ``reference.mix``.

    Args:
        sources: ``n`` tensors ``[T, d]`` of one dtype: the finished blocks, then the partial sum.
        query: ``[d]`` float32 pseudo-query times key-norm weight.
        key_eps: epsilon of the key norm.
        norm_weight, norm_eps: weight ``[d]`` and epsilon of the norm behind the mix.
        bias: ``[n]`` float32, added to the scores of the sources.

    Returns:
        ``[T, d]`` in the dtype of the sources.
    """
    mixed = mix(sources, query, key_eps, bias)
    return rms_norm(mixed, norm_weight, norm_eps, sources[0].dtype)


def mix(
    sources: Sequence[Tensor], query: Tensor, key_eps: float, bias: Tensor | None = None
) -> Tensor:
    """What ``single_pass`` norms, of the same arguments: ``[T, d]`` float32."""
    attend = _unrolled if _unroll(sources) else _stacked
    ((mixed, _),) = attend(sources, [query], key_eps, None if bias is None else [bias])
    return mixed


def phase_1(
    blocks: Tensors, queries: Tensors, key_eps: float, biases: Tensors | None = None
) -> Answers:
    """Phase 1 of two-phase: ``S`` sites attend to the finished blocks in one pass over them.

    Args:
        blocks: ``n`` tensors ``[T, d]`` of one dtype.
        queries: ``S`` tensors ``[d]``, float32, folded.
        key_eps: epsilon of the key norm.
        biases: ``S`` tensors ``[n]``, float32, added to the scores of the blocks.

    Returns:
        Per site the answer ``[T, d]`` and its log-sum-exp ``[T, 1]``, both float32.
    """
    attend = _unrolled if _unroll(blocks) else _stacked
    return attend(blocks, queries, key_eps, biases)


def phase_2(
    answer: Tensor,
    log_sum: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    key_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Phase 2 of two-phase: merge what came since by online softmax and norm the mix.

    The answer is one more source, whose score is its log-sum-exp.

    Args:
        answer: ``[T, d]`` float32, this site's answer of phase 1.
        log_sum: ``[T, 1]`` float32, its log-sum-exp.
        sources: ``[T, d]`` each, in the activation dtype: blocks finished since phase 1, then the
            partial sum.
        query, key_eps, norm_weight, norm_eps: as in ``single_pass``.
        bias: float32, added to the scores of ``sources``, as many as there are.

    Returns:
        ``[T, d]`` in the dtype of the sources.
    """
    scores = [log_sum, *_scores(sources, query, key_eps, bias)]
    mixed = _blend(scores, (answer, *sources))
    return rms_norm(mixed, norm_weight, norm_eps, sources[-1].dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm of ``x`` in float32, rounded once to ``dtype`` (that of ``x`` where it is None)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(dtype or x.dtype)


def _unroll(sources: Sequence[Tensor]) -> bool:
    return torch.compiler.is_compiling() and len(sources) <= MAX_UNROLLED


def _score(x: Tensor, query: Tensor, eps: float) -> Tensor:
    return (x * query).sum(-1, keepdim=True) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _scores(sources: Tensors, query: Tensor, eps: float, bias: Tensor | None) -> list[Tensor]:
    scores = [_score(source.float(), query, eps) for source in sources]
    return scores if bias is None else [*map(torch.add, scores, bias.unbind())]


def _blend(scores: list[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """The sources mixed by the softmax of their scores, ``[T, 1]`` each, in float32."""
    if _unroll(sources):
        return _blend_unrolled(scores, sources)[0]
    weights = torch.softmax(torch.cat(scores, dim=1), dim=1)
    stacked = torch.stack([source.float() for source in sources], dim=1)
    return torch.bmm(weights.unsqueeze(1), stacked).squeeze(1)


def _blend_unrolled(scores: list[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    top = reduce(torch.maximum, scores)
    powers = [torch.exp(score - top) for score in scores]
    total = reduce(torch.add, powers)
    rows = zip(powers, sources, strict=True)
    mixed = reduce(torch.add, [power / total * source.float() for power, source in rows])
    return mixed, top + torch.log(total)


def _unrolled(sources: Tensors, queries: Tensors, eps: float, biases: Tensors | None) -> Answers:
    pairs = zip(queries, biases or [None] * len(queries), strict=True)
    return tuple(
        _blend_unrolled(_scores(sources, query, eps, bias), sources) for query, bias in pairs
    )


def _stacked(sources: Tensors, queries: Tensors, eps: float, biases: Tensors | None) -> Answers:
    stacked = torch.stack(tuple(sources), dim=1).float()
    scale = torch.rsqrt(stacked.square().mean(-1, keepdim=True) + eps)
    scores = (stacked @ torch.stack(tuple(queries), dim=1)) * scale
    if biases is not None:
        scores = scores + torch.stack(tuple(biases), dim=1)
    log_sums = torch.logsumexp(scores, dim=1)
    weights = torch.exp(scores - log_sums.unsqueeze(1))
    mixed = torch.bmm(weights.transpose(1, 2), stacked)
    return tuple((mixed[:, site], log_sums[:, site].unsqueeze(-1)) for site in range(len(queries)))
