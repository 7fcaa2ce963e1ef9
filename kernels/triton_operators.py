"""What the operators of the triton backend do: arguments by position, as schemas have them, to the
kernels' functions."""

from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels import triton_open_group as group
from attnres_serve.kernels import triton_score_on_write
from attnres_serve.kernels import triton_single_pass as one
from attnres_serve.kernels import triton_two_phase as two_phase


def fold(queries: list[Tensor], key_norms: list[Tensor], logit_scale: float) -> Tensor:
    return torch.stack(queries).mul_(torch.stack(key_norms)).mul_(logit_scale)


def single_pass(delta, bank, queries, position, *site) -> Tensor:
    return one.single_pass(delta, bank, queries[position], **_site(*site))


def open_group(
    delta, bank, queries, position, count, completes, *site
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = queries[position : position + count]
    return group.open_group(delta, bank, chosen, completes=completes, **_site(*site))


def merge(delta, bank, answers, log_sums, number, first, queries, position, *site) -> Tensor:
    known = {"position": number, "first": first}
    own = queries[position]
    return two_phase.merge(delta, bank, answers, log_sums, own, **known, **_site(*site))


def score_rows(bank, scores, queries, position, first, count, key_eps) -> None:
    ahead, rows = queries[position:], {"first": first, "count": count}
    triton_score_on_write.score_rows(bank, ahead, scores[:, position:], **rows, key_eps=key_eps)


def mix_scored(delta, bank, scores, queries, position, *site) -> Tensor:
    own = scores, queries[position]
    options = _site(*site)
    return triton_score_on_write.mix_scored(delta, bank, *own, position=position, **options)


def add_to_row(delta, bank, row) -> None:
    bank[:, row] += delta


def _site(row, fresh, bias, norm_weight, key_eps, norm_eps) -> dict[str, Any]:
    return {
        "row": row,
        "fresh": fresh,
        "bias": bias,
        "norm_weight": norm_weight,
        "key_eps": key_eps,
        "norm_eps": norm_eps,
    }
