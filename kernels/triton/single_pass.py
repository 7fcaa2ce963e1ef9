"""One site of depth attention in one Triton launch (arXiv 2603.15031, sections 3 and 4).

A program owns a token: it adds the sublayer's output to the partial sum, writes that bank row,
mixes all rows by online softmax and norms the mix.  With an answer of phase 1 it is phase 2 as well
(``phase_2.phase_2``): an answer is one more source, whose score is its log-sum-exp and which
stands for the rows it was made from.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
``TRITON_INTERPRET=1``, set before Triton is imported, runs it on CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import (
    CONFIGS,
    Config,
    check_bias,
    check_site,
    compile_once,
    config_for,
    entry,
    launch_options,
    starts_early,
    takes_each_token_alone,
)

# So many tokens or fewer do not fill a large GPU: a program that takes more rows at a time is done
# sooner, though fewer of them fit on an SM.  Measured on an H100 at 1024, 4096 and 7168, and at
# 2048 in one cell (docs/measure/gpu.md).
FEW = 128
# Largest padded hidden size -> config for them.
FEW_CONFIGS = CONFIGS | {
    1024: Config(tile=4, num_warps=4),
    2048: Config(tile=4, num_warps=8),
    4096: Config(tile=4, num_warps=8),
    8192: Config(tile=2, num_warps=8),
}
# The same, for any number of tokens (measured: 1 and 512), of a merge that reads no row besides the
# answer.
PHASE_2_CONFIGS = CONFIGS | {8192: Config(tile=1, num_warps=16)}
# Up to this hidden size the square of a merge's mix follows from sums over its two sources, all of
# one reduction.  The sums take registers: beyond, a program less fits on an SM of two or three.
ONE_REDUCTION = 4096
# Where the sources cancel that square is a difference of larger numbers, whose rounding it has; if
# these are larger by more than this, it is summed itself.
MOST_LOST = tl.constexpr(8.0)


# What is not specialised here: one binary serves every number of sources, sites and tokens.
@triton.jit(do_not_specialize=["sum_site_stride", "sum_stride", "first", "row", "position"])
def site_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_answers,  # [sites, T, HIDDEN] or None
    p_log_sums,  # [sites, T] or None
    p_query,  # [HIDDEN]
    p_weight,  # [HIDDEN]
    p_bias,  # [row + 1] or None
    p_out,  # [T, HIDDEN]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    site_stride: tl.int64,
    answer_stride: tl.int64,
    sum_site_stride: tl.int64,
    sum_stride: tl.int64,
    out_stride: tl.int64,
    first,
    row,
    position,
    key_eps,
    norm_eps,
    FRESH: tl.constexpr,
    LOOP: tl.constexpr,  # False: first is row, and the loop is not compiled
    ONCE: tl.constexpr,  # one reduction
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    o_s = tl.arange(0, TILE)
    m_d = o_d < HIDDEN
    p_rows = p_bank + token * bank_stride + o_d  # [BLOCK]
    p_partial = p_rows + row * slot_stride  # [BLOCK]

    # The first tile is requested here and each later one a round early: loads overlap reductions.
    if p_answers is None:
        first = 0  # a constant saves 17 registers at 7168 on sm_90, and so a program per SM
    if LOOP:
        p_tile = p_rows[None, :] + (first + o_s)[:, None] * slot_stride  # [TILE, BLOCK]
        b_tile = tl.load(p_tile, mask=(first + o_s < row)[:, None] & m_d[None, :], other=0.0)
    b_new = tl.load(p_delta + token * delta_stride + o_d, mask=m_d, other=0.0)  # [BLOCK]
    if not FRESH:
        b_partial = tl.load(p_partial, mask=m_d, other=0.0)  # [BLOCK]
        b_new = (b_partial.to(tl.float32) + b_new.to(tl.float32)).to(b_new.dtype)
    b_query = tl.load(p_query + o_d, mask=m_d, other=0.0)  # [BLOCK]
    if p_answers is not None:
        p_answer = p_answers + position * site_stride + token * answer_stride + o_d  # [BLOCK]
        b_answer = tl.load(p_answer, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
        log_sum = tl.load(p_log_sums + position * sum_site_stride + token * sum_stride)
    if ONCE:
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(p_partial, b_new, mask=m_d)

    b_mix = b_new.to(tl.float32)  # [BLOCK]
    # Joined, the sums of a row share the barriers of one reduction.
    b_sums = tl.join(b_mix * b_mix, b_mix * b_query)  # [BLOCK, 2]
    if ONCE:  # and so do those that the square of the mix follows from
        b_sums = tl.join(b_sums, tl.join(b_answer * b_answer, b_mix * b_answer))  # [BLOCK, 2, 2]
        b_first, b_second = tl.split(tl.sum(b_sums, axis=0))  # [2] each
        square, dot = tl.split(b_first)
        answer_square, across = tl.split(b_second)
    else:
        square, dot = tl.split(tl.sum(b_sums, axis=0))
    top = dot * tl.rsqrt(square * (1.0 / HIDDEN) + key_eps)
    if p_bias is not None:
        top += tl.load(p_bias + row)
    total = 1.0
    if p_answers is not None:
        new_top = tl.maximum(top, log_sum)
        scale = tl.exp(top - new_top)
        share = tl.exp(log_sum - new_top)
        total = scale + share
        b_mix = b_mix * scale + share * b_answer
        top = new_top
    if LOOP:
        for begin in range(first, row, TILE):
            b_source = b_tile.to(tl.float32)  # [TILE, BLOCK]
            p_tile += TILE * slot_stride
            m_next = begin + TILE + o_s < row
            b_tile = tl.load(p_tile, mask=m_next[:, None] & m_d[None, :], other=0.0)
            b_products = tl.join(b_source * b_source, b_source * b_query[None, :])
            b_square, b_dot = tl.split(tl.sum(b_products, axis=1))  # [TILE] each
            b_score = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
            if p_bias is not None:
                b_score += tl.load(p_bias + begin + o_s, mask=begin + o_s < row, other=0.0)
            b_score = tl.where(begin + o_s < row, b_score, float("-inf"))
            new_top = tl.maximum(top, tl.max(b_score, axis=0))
            scale = tl.exp(top - new_top)
            b_share = tl.exp(b_score - new_top)  # [TILE]
            total = total * scale + tl.sum(b_share, axis=0)
            b_mix = b_mix * scale + tl.sum(b_share[:, None] * b_source, axis=0)
            top = new_top

    b_mix = b_mix * (1.0 / total)
    if ONCE:
        scale, share = scale * (1.0 / total), share * (1.0 / total)
        apart = scale * scale * square + share * share * answer_square
        square = apart + 2.0 * scale * share * across
        if not (apart - square * MOST_LOST <= 0.0):  # true of NaN, which infinite sums leave
            square = tl.sum(b_mix * b_mix, axis=0)
    else:
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
        square = tl.sum(b_mix * b_mix, axis=0)
    b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_weight
    tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def site_config(hidden: int, tokens: int, loop: bool) -> Config:
    """The config of a launch; ``loop``: whether it reads more rows than that of the partial sum."""
    if not loop:
        return entry(PHASE_2_CONFIGS, hidden)
    few = tokens <= FEW and not takes_each_token_alone()
    return entry(FEW_CONFIGS, hidden) if few else config_for(hidden)


def launch(
    delta: Tensor,
    bank: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    row: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    answers: tuple[Tensor, Tensor] | None = None,
    position: int = 0,
    first: int = 0,
) -> None:
    """Launch the kernel, on the device of the first argument.

    The first launch of many tokens compiles that of few as well.
    """
    tokens, hidden = delta.shape
    vectors, log_sums = answers or (None, None)
    loop = vectors is None or first < row
    config, few = (site_config(hidden, count, loop) for count in (tokens, FEW))
    arguments = {
        "p_delta": delta,
        "p_bank": bank,
        "p_answers": vectors,
        "p_log_sums": log_sums,
        "p_query": query,
        "p_weight": norm_weight,
        "p_bias": bias,
        "p_out": out,
        "delta_stride": delta.stride(0),
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "site_stride": 0 if vectors is None else vectors.stride(0),
        "answer_stride": 0 if vectors is None else vectors.stride(1),
        "sum_site_stride": 0 if log_sums is None else log_sums.stride(0),
        "sum_stride": 0 if log_sums is None else log_sums.stride(1),
        "out_stride": out.stride(0),
        "first": first,
        "row": row,
        "position": position,
        "key_eps": float(key_eps),
        "norm_eps": float(norm_eps),
        "FRESH": fresh,
        "LOOP": loop,
        "ONCE": not loop and hidden <= ONE_REDUCTION,
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "TILE": config.tile,
        "num_warps": config.num_warps,
        **launch_options(starts_early(delta.device)),
    }
    with torch.cuda.device_of(delta):
        if tokens > FEW and few != config:
            kind = (
                *("site", delta.device, delta.dtype, norm_weight.dtype, hidden),
                *(vectors is None, bias is None, fresh, arguments["EARLY"]),
            )
            other = {"TILE": few.tile, "num_warps": few.num_warps}
            compile_once(site_kernel, kind, lambda: arguments | other)
        site_kernel[(tokens,)](**arguments)


def single_pass(
    delta: Tensor,
    bank: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    row: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """One whole site: update bank row ``row`` in place, mix rows ``0..row``, norm the mix.

    The state update is exact: ``bank[:, row]`` becomes ``delta`` where the row is fresh, else
    ``bank[:, row] + delta`` as torch computes it.  Later rows are neither read nor written.
    Scores, softmax, mix and norm are in float32 with one rounding into the result.  With ``FEW``
    tokens or fewer, rows are summed in another order, unless ``common.take_each_token_alone``
    forbids that.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.  ``d`` is at most ``MAX_HIDDEN``, of any parity.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.
        query: ``[d]`` float32 pseudo-query, already multiplied by the key-norm weight.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that holds the partial sum; ``row + 1`` rows are mixed.
        fresh: whether a block begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        bias: ``[row + 1]`` float32, added to the scores of the rows; None for none.

    Returns:
        The result ``[T, d]`` in the dtype of ``delta``; empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, device or overlap outside this list, and on CPU tensors
            without the interpreter.
    """
    check_site(delta, bank, query, norm_weight, row)
    check_bias(delta, bias, row + 1)
    out = delta.new_empty(delta.shape)
    if delta.shape[0]:
        arguments = delta, bank, query, norm_weight, bias, out
        launch(*arguments, row=row, fresh=fresh, key_eps=key_eps, norm_eps=norm_eps)
    return out


__all__ = ["single_pass"]
