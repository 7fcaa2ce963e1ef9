"""Score on write: a site that knows the logits of all rows except its own sum's.

Of the row that it adds to itself it makes the logit as ``single_pass`` does, of all others it knows
the weights before it reads them (``score_rows``).  So its loads of those wait for no reduction and
for no other row, and rows without weight are not read at all.

The number of vectors is that of the single pass, and one more for each row that is scored; what is
saved is the chain of a reduction per row, and the rows that are skipped.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import (
    Config,
    check_site,
    config_for,
    launch_options,
    starts_early,
)
from attnres_serve.kernels.triton.score_rows import _check_scores


@triton.jit(
    do_not_specialize=["row", "position"],
    do_not_specialize_on_alignment=["p_scores"],
)
def mix_scored_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_scores,  # [T, sites, slots]
    p_query,  # [HIDDEN]
    p_weight,  # [HIDDEN]
    p_bias,  # [1] or None
    p_out,  # [T, HIDDEN]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    token_stride: tl.int64,
    site_stride: tl.int64,
    score_stride: tl.int64,
    out_stride: tl.int64,
    row,
    position,
    key_eps,
    norm_eps,
    skip_below,
    FRESH: tl.constexpr,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    o_s = tl.arange(0, TILE)
    o_slot = tl.arange(0, SLOTS)
    m_d = o_d < HIDDEN
    p_rows = p_bank + token * bank_stride + o_d  # [BLOCK]
    p_own = p_rows + row * slot_stride  # [BLOCK]
    p_tile = p_rows[None, :] + o_s[:, None] * slot_stride  # [TILE, BLOCK]
    p_score = p_scores + token * token_stride + position * site_stride
    p_share = p_score + o_s * score_stride  # [TILE]

    p_known = p_score + o_slot * score_stride  # [SLOTS]
    b_score = tl.load(p_known, mask=o_slot < row, other=float("-inf"))
    b_own = tl.load(p_delta + token * delta_stride + o_d, mask=m_d, other=0.0)  # [BLOCK]
    if not FRESH:
        b_partial = tl.load(p_own, mask=m_d, other=0.0)  # [BLOCK]
        b_own = (b_partial.to(tl.float32) + b_own.to(tl.float32)).to(b_own.dtype)
    tl.store(p_own, b_own, mask=m_d)

    b_mix = b_own.to(tl.float32)  # [BLOCK]
    b_query = tl.load(p_query + o_d, mask=m_d, other=0.0)  # [BLOCK]
    square, dot = tl.split(tl.sum(tl.join(b_mix * b_mix, b_mix * b_query), axis=0))
    score = dot * tl.rsqrt(square * (1.0 / HIDDEN) + key_eps)
    if p_bias is not None:
        score += tl.load(p_bias)
    top = tl.maximum(score, tl.max(b_score, axis=0))
    own = tl.exp(score - top)
    scale = 1.0 / (own + tl.sum(tl.exp(b_score - top), axis=0))

    # All weights are known.  Rows are still requested a round early, of no weight not at all.
    b_next = tl.load(p_share, mask=o_s < row, other=float("-inf"))  # [TILE]
    b_next = tl.exp(b_next - top) * scale
    b_tile = tl.load(p_tile, mask=(b_next > skip_below)[:, None] & m_d[None, :], other=0.0)
    b_mix = b_mix * (own * scale)
    for first in range(0, row, TILE):
        b_share = b_next
        b_source = b_tile.to(tl.float32)  # [TILE, BLOCK]
        p_tile += TILE * slot_stride
        p_share += TILE * score_stride
        b_next = tl.load(p_share, mask=first + TILE + o_s < row, other=float("-inf"))
        b_next = tl.exp(b_next - top) * scale
        b_tile = tl.load(p_tile, mask=(b_next > skip_below)[:, None] & m_d[None, :], other=0.0)
        b_mix += tl.sum(b_share[:, None] * b_source, axis=0)

    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    square = tl.sum(b_mix * b_mix, axis=0)
    b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_weight
    tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def mix_scored_arguments(
    delta: Tensor,
    bank: Tensor,
    scores: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    row: int,
    position: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    skip_below: float = 0.0,
    config: Config | None = None,
) -> dict[str, Any]:
    """As ``score_arguments``."""
    hidden = delta.shape[1]
    tile, num_warps = config or config_for(hidden)
    return {
        "p_delta": delta,
        "p_bank": bank,
        "p_scores": scores,
        "p_query": query,
        "p_weight": norm_weight,
        "p_bias": bias,
        "p_out": out,
        "delta_stride": delta.stride(0),
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "token_stride": scores.stride(0),
        "site_stride": scores.stride(1),
        "score_stride": scores.stride(2),
        "out_stride": out.stride(0),
        "row": row,
        "position": position,
        "key_eps": float(key_eps),
        "norm_eps": float(norm_eps),
        "skip_below": float(skip_below),
        "FRESH": fresh,
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "SLOTS": triton.next_power_of_2(scores.shape[2]),
        "TILE": tile,
        "num_warps": num_warps,
        **launch_options(starts_early(delta.device)),
    }


def mix_scored(
    delta: Tensor,
    bank: Tensor,
    scores: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    row: int,
    position: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    skip_below: float = 0.0,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """A site as ``single_pass``, with the logits of the rows before its own taken from ``scores``.

    The state update is exact, as there, and no other row is written.  Softmax, mix and norm are in
    float32 with one rounding into the result.

    A row whose weight is at or below ``skip_below`` is not read, and the other weights stay as they
    are: the norm removes a common factor anyway.  With weights ``w_i`` and rows ``v_i`` the mix
    changes by exactly the sum of the skipped ``w_i v_i``, whose root mean square is at most
    ``c = sum w_i rms(v_i)``, hence at most ``skip_below`` times the number of skipped rows times
    the largest of their root mean squares; equality where they are equal rows of that weight.
    The result, before its weight, changes by a root mean square of at most ``2 c / (R + R')`` where
    its own is at most one: ``R`` and ``R'`` are ``sqrt(mean square + norm_eps)`` of the two mixes.
    (That is the inequality of Dunkl and Williams for ``[mix, sqrt(d norm_eps)]``, the vector that
    the norm brings to length ``sqrt(d)``; equality where ``R = R'``.)

    At 0, the default, only weights that are zero in float32 are skipped, which changes nothing.
    While rows are no larger than the mix, 2^-24 over the number of rows stays below the float32
    rounding of the mix; but the sizes of rows are not known before they are read, and in deep
    models differ by orders of magnitude, so no positive default is safe.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.  ``d`` is at most ``MAX_HIDDEN``, of any parity.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.
        scores: ``[T, S, slots]`` float32, of any strides: logits of rows ``0..row-1``, as
            ``score_rows`` writes them.
        query: ``[d]`` float32 pseudo-query, folded as those that made the scores.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that ``delta`` is added to; ``row + 1`` rows are mixed.
        position: which site of ``scores`` this is.
        fresh: whether that row begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        skip_below: greatest weight of a row that is not read, from 0 to less than 1.  The row that
            ``delta`` is added to always counts.
        bias: ``[1]`` float32, added to the score of row ``row``; None for none.
        out: ``[T, d]`` result in the dtype of ``delta``, sharing memory with no other argument;
            allocated if None.
        config: compilation parameters in place of ``config_for(d)``, for measurements.

    Returns:
        ``out``.  Empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, position, device, overlap or ``skip_below`` outside
            this list, and on CPU tensors without the interpreter.
    """
    read = {"scores": scores.unsqueeze(-1)}
    check_site(delta, bank, query, norm_weight, bias, out, row, **read)
    _check_scores(scores, delta.shape[0])
    if not 0 <= position < scores.shape[1]:
        raise ValueError(f"position {position} is outside the {scores.shape[1]} sites of scores")
    if row > scores.shape[2]:
        raise ValueError(f"{row} rows before row {row}, but {scores.shape[2]} slots of scores")
    if not 0 <= skip_below < 1:
        raise ValueError(f"skip_below is {skip_below}, which is no weight from 0 to less than 1")
    if out is None:
        out = delta.new_empty(delta.shape)
    if delta.shape[0]:
        arguments = mix_scored_arguments(
            *(delta, bank, scores, query, norm_weight, bias, out),
            row=row,
            position=position,
            fresh=fresh,
            key_eps=key_eps,
            norm_eps=norm_eps,
            skip_below=skip_below,
            config=config,
        )
        with torch.cuda.device_of(delta):
            mix_scored_kernel[(delta.shape[0],)](**arguments)
    return out


__all__ = ["mix_scored"]
