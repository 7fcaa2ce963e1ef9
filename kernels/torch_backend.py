"""The torch backend: plain torch, on any device, eager or fused by a compiler; see ``backends``."""

from collections.abc import Sequence

from torch import Tensor

from attnres_serve.kernels import torch_path
from attnres_serve.kernels.backends import SiteWeights

IN_PLACE = False
Answers = tuple[tuple[Tensor, Tensor], ...]


def prepare() -> None:
    """Nothing to prepare."""


def single_pass(
    blocks: Sequence[Tensor], partial: Tensor | None, delta: Tensor, weights: SiteWeights
) -> tuple[Tensor, Tensor]:
    updated = delta if partial is None else partial + delta
    return torch_path.single_pass((*blocks, updated), *_arguments(weights)), updated


def inter_block(blocks: Sequence[Tensor], sites: Sequence[SiteWeights]) -> Answers:
    return torch_path.inter_block(blocks, [_folded(site) for site in sites], sites[0].key_eps)


def norm_answer(answers: Answers, position: int, weights: SiteWeights, like: Tensor) -> Tensor:
    answer, _ = answers[position]
    return torch_path.rms_norm(answer, weights.norm_weight, weights.norm_eps, like.dtype)


def merge(
    answers: Answers,
    position: int,
    blocks: Sequence[Tensor],
    partial: Tensor | None,
    delta: Tensor,
    weights: SiteWeights,
) -> tuple[Tensor, Tensor]:
    updated = delta if partial is None else partial + delta
    own = (*blocks, updated)
    return torch_path.merge(*answers[position], own, *_arguments(weights)), updated


def score(block: Tensor, sites: Sequence[SiteWeights]) -> tuple[Tensor, ...]:
    return torch_path.score(block, [_folded(site) for site in sites], sites[0].key_eps)


def mix_scored(
    scores: Sequence[tuple[Tensor, ...]],
    ahead: int,
    blocks: Sequence[Tensor],
    partial: Tensor | None,
    delta: Tensor,
    weights: SiteWeights,
) -> tuple[Tensor, Tensor]:
    updated = delta if partial is None else partial + delta
    known = [one[-ahead] for one in scores]
    return torch_path.mix_scored(known, (*blocks, updated), *_arguments(weights)), updated


def _folded(weights: SiteWeights) -> Tensor:
    query = weights.query * weights.key_norm
    return query if weights.logit_scale == 1 else query * weights.logit_scale


def _arguments(weights: SiteWeights) -> tuple:
    norm = weights.norm_weight, weights.norm_eps
    return _folded(weights), weights.key_eps, *norm, weights.bias
