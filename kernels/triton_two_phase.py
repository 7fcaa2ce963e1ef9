"""Two-phase depth attention in Triton (arXiv 2603.15031, section 4).

Pseudo-queries do not depend on the input, so all sites of a block can attend to the finished
blocks when it opens.  A block of ``S`` sites, whose partial sum will be bank row ``count``:

1. The output that arrives at its first site completes row ``count - 1``, in plain torch:
   ``bank[:, count - 1] += delta``.
2. ``inter_block`` (phase 1) reads the finished rows once and answers all its sites.
3. ``norm_answer`` norms the answer of the first site, which has no other source.
4. ``merge`` (phase 2), at every later site, adds the sublayer's output to row ``count`` and merges
   that row into the site's answer.

Phase 1 does not know a recency bias: with one, the first site is a ``single_pass`` and only the
later ones are answered.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
``TRITON_INTERPRET=1``, set before Triton is imported, runs the kernels on CPU.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton_common import (
    MAX_HIDDEN,
    check_activations,
    check_hidden,
    check_like,
    check_memory,
    check_norm_weight,
    check_out,
    check_query,
    check_site,
    config_for,
)


class GroupConfig(NamedTuple):
    """How a program of phase 1 is compiled: the sites it answers, and warps."""

    sites: int
    num_warps: int


# Largest padded hidden size -> config of phase 1; constants, as for the single pass, and chosen
# from benchmarks/compile_ahead.py, not from a measured run.  A program holds the queries and the
# mixes of its sites in registers, 2 * sites * padded size, and with 16 warps on an SM they fill it:
# at most 128 registers per thread at every size up to 8192, in any dtype on sm_80, 90 and 100,
# without spills.  Each group of sites reads the rows again (from L2), so the more sites the better:
# at 2048, 8 of them would leave 8 warps on an SM; at 7168, 4 of them spill 224 bytes.  For the same
# reason a program loads one row at a time, and the next one early: two at 7168 spill 48 bytes.
# At 16384 the half types spill up to 8 bytes and fp32 up to 80.
GROUP_CONFIGS = {
    256: GroupConfig(sites=4, num_warps=1),
    512: GroupConfig(sites=4, num_warps=2),
    1024: GroupConfig(sites=4, num_warps=4),
    2048: GroupConfig(sites=4, num_warps=8),
    4096: GroupConfig(sites=4, num_warps=16),
    8192: GroupConfig(sites=2, num_warps=16),
    MAX_HIDDEN: GroupConfig(sites=1, num_warps=16),
}


def group_config_for(hidden_size: int) -> GroupConfig:
    """The phase-1 config of a hidden size, at most ``MAX_HIDDEN``."""
    return GROUP_CONFIGS[min(limit for limit in GROUP_CONFIGS if hidden_size <= limit)]


# What is not specialised here: one binary serves every number of blocks, sites and tokens.
@triton.jit(do_not_specialize=["sum_site_stride", "sum_stride", "count", "sites"])
def inter_block_kernel(
    p_bank,  # [T, slots, HIDDEN]
    p_queries,  # [sites, HIDDEN]
    p_answers,  # [sites, T, HIDDEN]
    p_log_sums,  # [sites, T]
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    query_stride: tl.int64,
    site_stride: tl.int64,
    answer_stride: tl.int64,
    sum_site_stride: tl.int64,
    sum_stride: tl.int64,
    count,
    sites,
    key_eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SITES: tl.constexpr,
):
    # The groups of a token run side by side: the first reads its rows from HBM, the others from L2.
    groups = tl.cdiv(sites, SITES)
    token = (tl.program_id(0) // groups).to(tl.int64)
    o_site = tl.program_id(0) % groups * SITES + tl.arange(0, SITES)
    o_d = tl.arange(0, BLOCK)[None, :]
    o_next = 1 + tl.arange(0, 1)[:, None]  # [1, 1]; the interpreter cannot mask by a scalar
    m_d = o_d < HIDDEN
    m_site = o_site < sites
    m_group = m_site[:, None] & m_d  # [SITES, BLOCK]
    p_row = p_bank + token * bank_stride + o_d  # [1, BLOCK]

    # As in the single pass, a row is requested a round before its use.
    b_row = tl.load(p_row, mask=m_d, other=0.0)
    b_query = tl.load(p_queries + o_site[:, None] * query_stride + o_d, mask=m_group, other=0.0)
    b_mix = tl.zeros([SITES, BLOCK], tl.float32)
    b_top = tl.full([SITES], float("-inf"), tl.float32)
    b_total = tl.zeros([SITES], tl.float32)
    for index in range(0, count):
        b_source = b_row.to(tl.float32)  # [1, BLOCK]
        p_row += slot_stride
        b_row = tl.load(p_row, mask=(index + o_next < count) & m_d, other=0.0)
        b_square = tl.sum(b_source * b_source, axis=1)  # [1]
        b_dot = tl.sum(b_query * b_source, axis=1)  # [SITES]
        b_score = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
        b_new_top = tl.maximum(b_top, b_score)
        b_scale = tl.exp(b_top - b_new_top)
        b_share = tl.exp(b_score - b_new_top)
        b_total = b_total * b_scale + b_share
        b_mix = b_mix * b_scale[:, None] + b_share[:, None] * b_source
        b_top = b_new_top

    b_answer = (b_mix * (1.0 / b_total)[:, None]).to(p_answers.dtype.element_ty)
    p_answer = p_answers + o_site[:, None] * site_stride + token * answer_stride + o_d
    tl.store(p_answer, b_answer, mask=m_group)
    p_sum = p_log_sums + o_site * sum_site_stride + token * sum_stride
    tl.store(p_sum, b_top + tl.log(b_total), mask=m_site)


@triton.jit(do_not_specialize=["sum_site_stride", "sum_stride", "row", "position"])
def merge_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_answers,  # [sites, T, HIDDEN]
    p_log_sums,  # [sites, T]
    p_query,  # [HIDDEN]
    p_weight,  # [HIDDEN]
    p_bias,  # [1] or None
    p_out,  # [T, HIDDEN]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    site_stride: tl.int64,
    answer_stride: tl.int64,
    sum_site_stride: tl.int64,
    sum_stride: tl.int64,
    out_stride: tl.int64,
    row,
    position,
    key_eps,
    norm_eps,
    FRESH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < HIDDEN
    p_own = p_bank + token * bank_stride + row * slot_stride + o_d  # [BLOCK]
    p_answer = p_answers + position * site_stride + token * answer_stride + o_d  # [BLOCK]

    b_own = tl.load(p_delta + token * delta_stride + o_d, mask=m_d, other=0.0)  # [BLOCK]
    if not FRESH:
        b_partial = tl.load(p_own, mask=m_d, other=0.0)  # [BLOCK]
        b_own = (b_partial.to(tl.float32) + b_own.to(tl.float32)).to(b_own.dtype)
    b_query = tl.load(p_query + o_d, mask=m_d, other=0.0)  # [BLOCK]
    b_answer = tl.load(p_answer, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    log_sum = tl.load(p_log_sums + position * sum_site_stride + token * sum_stride)
    tl.store(p_own, b_own, mask=m_d)

    b_source = b_own.to(tl.float32)  # [BLOCK]
    square, dot = tl.split(tl.sum(tl.join(b_source * b_source, b_source * b_query), axis=0))
    score = dot * tl.rsqrt(square * (1.0 / HIDDEN) + key_eps)
    if p_bias is not None:
        score += tl.load(p_bias)
    top = tl.maximum(score, log_sum)
    share = tl.exp(score - top)
    rest = tl.exp(log_sum - top)
    b_mix = (share * b_source + rest * b_answer) * (1.0 / (share + rest))

    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    square = tl.sum(b_mix * b_mix, axis=0)
    b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_weight
    tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["position"])
def norm_answer_kernel(
    p_answers,  # [sites, T, HIDDEN]
    p_weight,  # [HIDDEN]
    p_out,  # [T, HIDDEN]
    site_stride: tl.int64,
    answer_stride: tl.int64,
    out_stride: tl.int64,
    position,
    norm_eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < HIDDEN
    p_answer = p_answers + position * site_stride + token * answer_stride + o_d  # [BLOCK]
    b_mix = tl.load(p_answer, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    square = tl.sum(b_mix * b_mix, axis=0)
    b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_weight
    tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def _check_answers(answers: Tensor, position: int) -> None:
    if answers.dim() != 3:
        raise ValueError(f"answers must be [sites, tokens, hidden], not {list(answers.shape)}")
    if not 0 <= position < answers.shape[0]:
        raise ValueError(f"position {position} is outside the {answers.shape[0]} sites of phase 1")
    check_activations("answers", answers)
    check_hidden(answers.shape[2])


def inter_block_arguments(
    bank: Tensor,
    queries: Tensor,
    answers: Tensor,
    log_sums: Tensor,
    *,
    count: int,
    key_eps: float,
    config: GroupConfig | None = None,
) -> dict[str, Any]:
    """Everything a launch passes to the kernel; also what an ahead-of-time compilation needs."""
    hidden = bank.shape[2]
    sites, num_warps = config or group_config_for(hidden)
    return {
        "p_bank": bank,
        "p_queries": queries,
        "p_answers": answers,
        "p_log_sums": log_sums,
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "query_stride": queries.stride(0),
        "site_stride": answers.stride(0),
        "answer_stride": answers.stride(1),
        "sum_site_stride": log_sums.stride(0),
        "sum_stride": log_sums.stride(1),
        "count": count,
        "sites": queries.shape[0],
        "key_eps": float(key_eps),
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "SITES": sites,
        "num_warps": num_warps,
        "enable_fp_fusion": True,
    }


def merge_arguments(
    delta: Tensor,
    bank: Tensor,
    answers: Tensor,
    log_sums: Tensor,
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
) -> dict[str, Any]:
    """As ``inter_block_arguments``; the warps are those of the single pass."""
    hidden = delta.shape[1]
    return {
        "p_delta": delta,
        "p_bank": bank,
        "p_answers": answers,
        "p_log_sums": log_sums,
        "p_query": query,
        "p_weight": norm_weight,
        "p_bias": bias,
        "p_out": out,
        "delta_stride": delta.stride(0),
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "site_stride": answers.stride(0),
        "answer_stride": answers.stride(1),
        "sum_site_stride": log_sums.stride(0),
        "sum_stride": log_sums.stride(1),
        "out_stride": out.stride(0),
        "row": row,
        "position": position,
        "key_eps": float(key_eps),
        "norm_eps": float(norm_eps),
        "FRESH": fresh,
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "num_warps": config_for(hidden).num_warps,
        "enable_fp_fusion": True,
    }


def norm_answer_arguments(
    answers: Tensor, norm_weight: Tensor, out: Tensor, *, position: int, norm_eps: float
) -> dict[str, Any]:
    """As ``merge_arguments``."""
    hidden = answers.shape[2]
    return {
        "p_answers": answers,
        "p_weight": norm_weight,
        "p_out": out,
        "site_stride": answers.stride(0),
        "answer_stride": answers.stride(1),
        "out_stride": out.stride(0),
        "position": position,
        "norm_eps": float(norm_eps),
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "num_warps": config_for(hidden).num_warps,
        "enable_fp_fusion": True,
    }


def inter_block(
    bank: Tensor,
    queries: Tensor,
    *,
    count: int,
    key_eps: float,
    out: tuple[Tensor, Tensor] | None = None,
    config: GroupConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase 1: all sites of a block attend to the finished blocks, in one launch.

    Scores, softmax and mix are in float32.  Rounding the answer to the activation dtype, of unit
    roundoff ``u``, changes a mix merged from it by at most ``(1 - w) * u * abs(answer)``, where
    ``w`` is the weight of the partial sum: together with the final rounding about two where the
    single pass has one.  An answer does not depend on what else is computed with it.

    Args:
        bank: ``[T, slots, d]`` float32, float16 or bfloat16; any strides on tokens and slots.
            ``d`` is at most ``MAX_HIDDEN``, of any parity.
        queries: ``[S, d]`` float32 pseudo-queries, already multiplied by key-norm weight and logit
            scale; any stride on sites.
        count: rows that hold finished blocks; later rows are not read.
        key_eps: epsilon of the key norm.
        out: the two results, of any strides (unit on ``d``), sharing no memory with an argument;
            allocated if None, a token's sites side by side, so that no stride depends on ``T``.
        config: compilation parameters in place of ``group_config_for(d)``, for measurements.

    Returns:
        The normalised answers ``[S, T, d]`` in the dtype of ``bank`` and their log-sum-exp
        ``[S, T]`` in float32.  Without a launch if ``S`` or ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, count, device or overlap outside this list, and on CPU
            tensors without the interpreter.
    """
    if bank.dim() != 3 or queries.dim() != 2:
        raise ValueError(
            "bank must be [tokens, slots, hidden] and queries [sites, hidden], "
            f"not {list(bank.shape)} and {list(queries.shape)}"
        )
    tokens, slots, hidden = bank.shape
    sites = queries.shape[0]
    check_hidden(hidden)
    check_activations("bank", bank)
    check_query("queries", queries, sites, hidden)
    if not 1 <= count <= slots:
        raise ValueError(f"count {count} is outside 1..{slots}, the slots of the bank")
    if out is None:
        answers = bank.new_empty((tokens, sites, hidden)).transpose(0, 1)
        log_sums = queries.new_empty((tokens, sites)).t()
    else:
        answers, log_sums = out
        check_like("answers", answers, (sites, tokens, hidden), bank.dtype)
        check_like("log_sums", log_sums, (sites, tokens), torch.float32)
    check_memory(
        {"bank": bank, "queries": queries},
        results={"answers": answers, "log_sums": log_sums.unsqueeze(-1)},
    )
    if tokens and sites:
        arguments = inter_block_arguments(
            bank, queries, answers, log_sums, count=count, key_eps=key_eps, config=config
        )
        with torch.cuda.device_of(bank):
            inter_block_kernel[(tokens * -(-sites // arguments["SITES"]),)](**arguments)
    return answers, log_sums


def merge(
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
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Phase 2: update bank row ``row`` in place, merge it into an answer, norm the mix.

    The state update is exact, as in ``single_pass``; no other row is read or written.  Score,
    softmax, mix and norm are in float32 with one rounding into the result.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.
        answers: ``[S, T, d]`` of ``inter_block``, in the dtype of ``delta``.
        log_sums: ``[S, T]`` of ``inter_block``.
        query: ``[d]`` float32 pseudo-query of this site, folded as those of phase 1.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that holds the partial sum.
        position: which site of phase 1 this is.
        fresh: whether the partial sum begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        bias: ``[1]`` float32, added to the score of the partial sum; None for none.
        out: ``[T, d]`` result in the dtype of ``delta``, sharing memory with no other argument;
            allocated if None.

    Returns:
        ``out``.  Empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, position, device or overlap outside this list, and on
            CPU tensors without the interpreter.
    """
    _check_answers(answers, position)
    sites, shape = answers.shape[0], delta.shape
    check_like("answers", answers, (sites, *shape), delta.dtype)
    check_like("log_sums", log_sums, (sites, *shape[:1]), torch.float32)
    read = {"answers": answers, "log_sums": log_sums.unsqueeze(-1)}
    check_site(delta, bank, query, norm_weight, bias, out, row, **read)
    if out is None:
        out = delta.new_empty(shape)
    if shape[0]:
        arguments = merge_arguments(
            delta,
            bank,
            answers,
            log_sums,
            query,
            norm_weight,
            bias,
            out,
            row=row,
            position=position,
            fresh=fresh,
            key_eps=key_eps,
            norm_eps=norm_eps,
        )
        with torch.cuda.device_of(delta):
            merge_kernel[(shape[0],)](**arguments)
    return out


def norm_answer(
    answers: Tensor,
    norm_weight: Tensor,
    *,
    position: int,
    norm_eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """The result of a site whose sources are finished blocks only: its answer, normed.

    Args:
        answers: ``[S, T, d]`` of ``inter_block``.
        norm_weight: ``[d]`` weight of the output norm, float32, float16 or bfloat16.
        position: which site of phase 1 this is.
        norm_eps: epsilon of the output norm.
        out: ``[T, d]`` result in the dtype of ``answers``, sharing memory with no other argument;
            allocated if None.

    Returns:
        ``out``.  Empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, position, device or overlap outside this list, and on CPU
            tensors without the interpreter.
    """
    _check_answers(answers, position)
    check_norm_weight(norm_weight, answers.shape[2])
    answer = answers[position]
    if out is None:
        out = answer.new_empty(answer.shape)
    check_out(out, "an answer", answer)
    check_memory({"answers": answers, "norm_weight": norm_weight}, results={"out": out})
    if answer.shape[0]:
        arguments = norm_answer_arguments(
            answers, norm_weight, out, position=position, norm_eps=norm_eps
        )
        with torch.cuda.device_of(answers):
            norm_answer_kernel[(answer.shape[0],)](**arguments)
    return out


__all__ = ["GROUP_CONFIGS", "GroupConfig", "inter_block", "merge", "norm_answer"]
