"""The specification of depth attention (arXiv 2603.15031, sections 3 and 4), in plain torch.

Every kernel and every algorithm in this package is compared with these functions.  They accumulate
in float32, or in float64 when ``compute_dtype`` says so, and round once at the end.

Shapes: ``T`` tokens, ``d`` hidden size, ``n`` sources, ``S`` sites of one block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scores(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """Logits of depth attention, the query times the RMS-normalised source.

    Args:
        sources: ``[..., n, d]``, in the compute dtype.
        query: ``[d]`` pseudo-query, already multiplied by the key-norm weight.
        eps: epsilon of the key norm.

    Returns:
        ``[..., n]`` logits.  There is no 1/sqrt(d) (section 3).
    """
    return (sources * query).sum(-1) * torch.rsqrt(sources.square().mean(-1) + eps)


def mix(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    compute_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over depth: raw sources mixed by the weights of their normalised keys.

    Args:
        sources: ``n`` tensors ``[T, d]`` of one dtype.
        query: ``[d]`` pseudo-query times key-norm weight.
        eps: epsilon of the key norm.
        compute_dtype: dtype of scores, softmax and sum.
        bias: ``[n]``, added to the scores of the sources.

    Returns:
        The mix ``[T, d]`` and the weights ``[T, n]``, both in ``compute_dtype``.
    """
    stacked = torch.stack(tuple(sources), dim=-2).to(compute_dtype)
    logits = scores(stacked, query.to(compute_dtype), eps)
    if bias is not None:
        logits = logits + bias.to(compute_dtype)
    weights = torch.softmax(logits, dim=-1)
    return weighted(stacked, weights), weights


def weighted(stacked: Tensor, weights: Tensor) -> Tensor:
    """The sum ``[T, d]`` of sources ``[T, n, d]`` by weights ``[T, n]``."""
    return (weights.unsqueeze(-1) * stacked).sum(-2)


def phase_1(
    blocks: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    compute_dtype: torch.dtype = torch.float32,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase 1 of two-phase: all ``S`` sites of a block attend to the finished blocks at once.

    Args:
        blocks: ``n`` tensors ``[T, d]``.
        queries: ``[S, d]`` folded pseudo-queries.
        eps: epsilon of the key norm.
        compute_dtype: dtype of the computation and of both results.
        biases: ``[S, n]``, those of the sites for these blocks.

    Returns:
        The normalised answers ``[S, T, d]`` and their log-sum-exp ``[S, T]``.
    """
    stacked = torch.stack(tuple(blocks), dim=-2).to(compute_dtype)
    answers, log_sums = [], []
    for site, query in enumerate(queries.to(compute_dtype)):
        logits = scores(stacked, query, eps)
        if biases is not None:
            logits = logits + biases[site].to(compute_dtype)
        log_sums.append(torch.logsumexp(logits, dim=-1))
        answers.append(weighted(stacked, torch.softmax(logits, -1)))
    return torch.stack(answers), torch.stack(log_sums)


def phase_2(
    answer: Tensor,
    log_sum: Tensor,
    partial: Tensor,
    query: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Phase 2 of two-phase: online softmax of a phase-1 answer with the partial sum.

    Args:
        answer: ``[T, d]`` answer of this site, in the compute dtype.
        log_sum: ``[T]`` its log-sum-exp.
        partial: ``[T, d]`` running partial sum, already rounded to the activation dtype.
        query: ``[d]`` folded pseudo-query.
        eps: epsilon of the key norm.
        bias: ``[1]``, that of the partial sum.

    Returns:
        The mix ``[T, d]`` over the finished blocks and the partial sum, in the dtype of ``answer``.
    """
    wide = partial.to(answer.dtype)
    logit = scores(wide, query.to(answer.dtype), eps)
    if bias is not None:
        logit = logit + bias.to(answer.dtype)
    weight = torch.sigmoid(logit - log_sum).unsqueeze(-1)
    return torch.lerp(answer, wide, weight)  # exactly one of them where the weight is 0 or 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in the dtype of ``x``: the mix is normed before rounding."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def add_partial(partial: Tensor | None, delta: Tensor) -> Tensor:
    """The running partial sum after one more sublayer output, rounded to the activation dtype."""
    return delta if partial is None else partial + delta


def site(
    delta: Tensor,
    partial: Tensor | None,
    blocks: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    key_eps: float,
    norm_eps: float,
    compute_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One whole site: add the sublayer's output, mix all sources, apply the norm.

    Args:
        delta: ``[T, d]`` output of the previous sublayer.
        partial: ``[T, d]`` partial sum before it, None where a block begins.
        blocks: finished blocks, each ``[T, d]``.
        query: ``[d]`` folded pseudo-query.
        norm_weight: ``[d]`` weight of the norm behind the mix.
        key_eps, norm_eps: the two epsilons.
        compute_dtype: dtype of everything after the addition.
        bias: ``[n]``, added to the scores of the blocks and the partial sum.

    Returns:
        The normed mix in the dtype of ``delta``, and the new partial sum.
    """
    partial = add_partial(partial, delta)
    mixed, _ = mix([*blocks, partial], query, key_eps, compute_dtype, bias)
    return rms_norm(mixed, norm_weight, norm_eps).to(delta.dtype), partial
