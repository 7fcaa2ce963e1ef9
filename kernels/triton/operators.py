"""What the operators of the triton backend do: arguments by position, as schemas have them, to the
kernels' functions."""

from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels.triton import mix_scored as mixing
from attnres_serve.kernels.triton import open_group as group
from attnres_serve.kernels.triton import score_rows as scoring
from attnres_serve.kernels.triton import single_pass as one
from attnres_serve.kernels.triton import two_phase


def fold(queries: list[Tensor], key_norms: list[Tensor], logit_scale: float) -> Tensor:
    return torch.stack(queries).mul_(torch.stack(key_norms)).mul_(logit_scale)


def single_pass(delta: Tensor, bank: Tensor, queries: Tensor, position: int, *site: Any) -> Tensor:
    return one.single_pass(delta, bank, queries[position], **_site(*site))


def open_group(
    delta: Tensor,
    bank: Tensor,
    queries: Tensor,
    position: int,
    count: int,
    completes: bool,
    *site: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = queries[position : position + count]
    return group.open_group(delta, bank, chosen, completes=completes, **_site(*site))


def merge(
    delta: Tensor,
    bank: Tensor,
    answers: Tensor,
    log_sums: Tensor,
    number: int,
    first: int,
    queries: Tensor,
    position: int,
    *site: Any,
) -> Tensor:
    own = queries[position]
    options = {"position": number, "first": first, **_site(*site)}
    return two_phase.merge(delta, bank, answers, log_sums, own, **options)


def score_rows(
    bank: Tensor,
    scores: Tensor,
    queries: Tensor,
    position: int,
    first: int,
    count: int,
    key_eps: float,
) -> None:
    ahead, own = queries[position:], scores[:, position:]
    scoring.score_rows(bank, ahead, own, first=first, count=count, key_eps=key_eps)


def mix_scored(
    delta: Tensor, bank: Tensor, scores: Tensor, queries: Tensor, position: int, *site: Any
) -> Tensor:
    own = scores, queries[position]
    options = _site(*site)
    return mixing.mix_scored(delta, bank, *own, position=position, **options)


def add_to_row(delta: Tensor, bank: Tensor, row: int) -> None:
    bank[:, row] += delta


def _site(
    row: int,
    fresh: bool,
    bias: Tensor | None,
    norm_weight: Tensor,
    key_eps: float,
    norm_eps: float,
) -> dict[str, Any]:
    return {
        "row": row,
        "fresh": fresh,
        "bias": bias,
        "norm_weight": norm_weight,
        "key_eps": key_eps,
        "norm_eps": norm_eps,
    }
