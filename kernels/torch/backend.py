"""The torch backend: plain torch, on any device, eager or fused by a compiler."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.kernels.torch import functions as torch_functions

IN_PLACE: Final = False
Answers = tuple[tuple[Tensor, Tensor], ...]


def prepare(dtype: torch.dtype | None = None) -> None:
    """Nothing to prepare; any dtype."""


def single_pass(
    blocks: Sequence[Tensor], partial: Tensor | None, delta: Tensor, weights: SiteWeights
) -> tuple[Tensor, Tensor]:
    updated = delta if partial is None else partial + delta
    normed = torch_functions.single_pass(
        (*blocks, updated),
        _folded(weights),
        weights.key_eps,
        weights.norm_weight,
        weights.norm_eps,
        weights.bias,
    )
    return normed, updated


def phase_1(blocks: Sequence[Tensor], sites: Sequence[SiteWeights]) -> Answers:
    queries = [_folded(site) for site in sites]
    known = [site.bias[: len(blocks)] for site in sites if site.bias is not None]
    return torch_functions.phase_1(blocks, queries, sites[0].key_eps, known or None)


def norm_answer(answers: Answers, weights: SiteWeights, like: Tensor) -> Tensor:
    answer, _ = answers[0]
    return torch_functions.rms_norm(answer, weights.norm_weight, weights.norm_eps, like.dtype)


def phase_2(
    answers: Answers,
    position: int,
    blocks: Sequence[Tensor],
    partial: Tensor | None,
    delta: Tensor,
    weights: SiteWeights,
) -> tuple[Tensor, Tensor]:
    updated = delta if partial is None else partial + delta
    answer, log_sum = answers[position]
    bias = weights.bias
    normed = torch_functions.phase_2(
        answer,
        log_sum,
        (*blocks, updated),
        _folded(weights),
        weights.key_eps,
        weights.norm_weight,
        weights.norm_eps,
        bias if bias is None else bias[-len(blocks) - 1 :],
    )
    return normed, updated


def _folded(weights: SiteWeights) -> Tensor:
    query = weights.query * weights.key_norm
    return query if weights.logit_scale == 1 else query * weights.logit_scale
