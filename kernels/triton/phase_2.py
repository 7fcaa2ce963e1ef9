"""Phase 2 of two-phase in Triton (arXiv 2603.15031, section 4).

At every later site of a group, the sublayer's output is added to the partial sum's row, which is
merged into the site's answer of phase 1.  Where blocks are single sublayers (Full AttnRes), one
phase 1 may answer for the sites of several: a merge then reads the rows finished since.  The kernel
is the single pass's.

``TRITON_INTERPRET=1``, set before Triton is imported, runs the kernel on CPU.
"""

from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels.triton.common import check_bias, check_like, check_site
from attnres_serve.kernels.triton.single_pass import launch


def phase_2(
    delta: Tensor,
    bank: Tensor,
    answers: Tensor,
    log_sums: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    row: int,
    position: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    first: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Phase 2: update bank row ``row`` in place, merge it into an answer, norm the mix.

    The state update is exact, as in ``single_pass``; no other row is written, and only rows
    ``first..row-1`` are read besides.  Scores, softmax, mix and norm are in float32 with one
    rounding into the result.  Up to ``ONE_REDUCTION`` channels the square under the norm may lose
    three binary digits where answer and partial sum cancel.  Where rows are read besides, ``FEW``
    tokens or fewer have them summed in another order, as in ``single_pass``.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.
        answers: ``[S, T, d]`` of ``phase_1``, in the dtype of ``delta``.
        log_sums: ``[S, T]`` beside them.
        query: ``[d]`` float32 pseudo-query of this site, folded as those of phase 1.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that holds the partial sum.
        position: which site of phase 1 this is.
        fresh: whether the partial sum begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        first: the answer stands for the rows before this one; later ones were finished after
            phase 1.  ``row`` if None: there are none.
        bias: ``[row + 1]`` float32, of which those of the rows that are read are added to their
            scores; None for none.

    Returns:
        The result ``[T, d]`` in the dtype of ``delta``; empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, first, position, device or overlap outside this list,
            and on CPU tensors without the interpreter.
    """
    first = row if first is None else first
    if answers.dim() != 3:
        raise ValueError(f"answers must be [sites, tokens, hidden], not {list(answers.shape)}")
    if not 0 <= position < answers.shape[0]:
        raise ValueError(f"position {position} is outside the {answers.shape[0]} sites of phase 1")
    sites, shape = answers.shape[0], delta.shape
    check_like("answers", answers, (sites, *shape), delta.dtype)
    check_like("log_sums", log_sums, (sites, *shape[:1]), torch.float32)
    read = {"answers": answers, "log_sums": log_sums.unsqueeze(-1)}
    check_site(delta, bank, query, norm_weight, row, **read)
    check_bias(delta, bias, row + 1)
    if not 0 <= first <= row:
        raise ValueError(f"first {first} is outside 0..{row}, the row of the partial sum")
    out = delta.new_empty(shape)
    if shape[0]:
        arguments = delta, bank, query, norm_weight, bias, out
        state: dict[str, Any] = {"row": row, "fresh": fresh, "first": first}
        state |= {"key_eps": key_eps, "norm_eps": norm_eps}
        launch(*arguments, **state, answers=(answers, log_sums), position=position)
    return out


__all__ = ["phase_2"]
