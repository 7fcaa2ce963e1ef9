"""What the operators of the triton backend do: arguments by position, as schemas have them, to the
kernels' functions.

The numbers of a slot come as a tensor, see ``interface.BankSlot``.
"""

from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels.triton import phase_1 as first_phase
from attnres_serve.kernels.triton import phase_2 as second_phase
from attnres_serve.kernels.triton import single_pass as one


def fold(queries: list[Tensor], key_norms: list[Tensor], logit_scale: float) -> Tensor:
    return torch.stack(queries).mul_(torch.stack(key_norms)).mul_(logit_scale)


def pad(biases: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(biases, batch_first=True)


def single_pass(delta: Tensor, bank: Tensor, queries: Tensor, slot: Tensor, *site: Any) -> Tensor:
    row, position, *_ = slot.tolist()
    return one.single_pass(delta, bank, queries[position], **_site(row, *site))


def phase_1(
    delta: Tensor,
    bank: Tensor,
    queries: Tensor,
    count: int,
    completes: bool,
    slot: Tensor,
    *site: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    row, position, *_ = slot.tolist()
    chosen, arguments = slice(position, position + count), _site(row, *site)
    biases = arguments.pop("bias")
    arguments["biases"] = None if biases is None else biases[chosen]
    return first_phase.phase_1(delta, bank, queries[chosen], completes=completes, **arguments)


def phase_2(
    delta: Tensor,
    bank: Tensor,
    answers: Tensor,
    log_sums: Tensor,
    queries: Tensor,
    slot: Tensor,
    *site: Any,
) -> Tensor:
    row, position, first, number = slot.tolist()
    options = {"position": number, "first": first, **_site(row, *site)}
    return second_phase.phase_2(delta, bank, answers, log_sums, queries[position], **options)


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
