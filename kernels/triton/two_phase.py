"""Two-phase depth attention in Triton (arXiv 2603.15031, section 4).

Pseudo-queries do not depend on the input, so all sites of a block can attend to the finished
blocks when it opens:

1. ``inter_block`` (phase 1) reads the finished rows once and answers all its sites.  It is phase 1
   by itself; ``open_group`` has it in the launch of the first site.
2. ``merge`` (phase 2), at every later site, adds the sublayer's output to the partial sum's row and
   merges that row into the site's answer.  Where blocks are single sublayers (Full AttnRes), one
   phase 1 may answer for the sites of several: a merge then reads the rows finished since.  Its
   kernel is the single pass's.

A recency bias is added to the score of the row that a site itself adds to, so phase 1 does not know
it.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
``TRITON_INTERPRET=1``, set before Triton is imported, runs the kernels on CPU.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import (
    MAX_HIDDEN,
    check_activations,
    check_hidden,
    check_like,
    check_memory,
    check_query,
    check_site,
    entry,
    launch_options,
    starts_early,
)
from attnres_serve.kernels.triton.single_pass import launch


class GroupConfig(NamedTuple):
    """How a program of phase 1 is compiled: the sites it answers, and warps."""

    sites: int
    num_warps: int


# Largest padded hidden size -> config of phase 1; constants, as for the single pass, and held
# against others on an H100 at 1024, 4096 and 7168 (docs/measure/gpu.md).  A program holds the
# queries and the mixes of its sites in registers, 2 * sites * padded size.  What bounds it are
# instructions: a reduction costs every warp the same however little it adds, so few warps with many
# registers win, as long as nothing spills (nothing does up to 8192, in any dtype on sm_80 and 90).
# Each group of sites reads the rows again (from L2).  A program loads one row at a time, and the
# next one early.  At 16384 the half types spill up to 8 bytes and fp32 up to 80.
GROUP_CONFIGS = {
    256: GroupConfig(sites=4, num_warps=1),
    512: GroupConfig(sites=4, num_warps=1),
    1024: GroupConfig(sites=2, num_warps=1),
    2048: GroupConfig(sites=2, num_warps=2),
    4096: GroupConfig(sites=2, num_warps=4),
    7168: GroupConfig(sites=1, num_warps=4),
    8192: GroupConfig(sites=2, num_warps=8),
    MAX_HIDDEN: GroupConfig(sites=1, num_warps=16),
}


def group_config_for(hidden_size: int) -> GroupConfig:
    """The phase-1 config of a hidden size, at most ``MAX_HIDDEN``."""
    return entry(GROUP_CONFIGS, hidden_size)


@triton.jit
def attend(
    p_row,  # [1, BLOCK], row 0 of a token
    b_row,  # [1, BLOCK], what is there: it was requested early
    b_query,  # [SITES, BLOCK]
    b_mix,  # [SITES, BLOCK]
    b_top,  # [SITES]
    b_total,  # [SITES]
    slot_stride,
    count,
    key_eps,
    m_d,
    HIDDEN: tl.constexpr,
):
    """Online softmax of several sites over rows ``0..count-1``; mix, top and total go on."""
    o_next = 1 + tl.arange(0, 1)[:, None]  # [1, 1]; the interpreter cannot mask by a scalar
    for index in range(0, count):
        b_source = b_row.to(tl.float32)  # [1, BLOCK]
        p_row += slot_stride
        # As in the single pass, a row is requested a round before its use.
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
    return b_mix * (1.0 / b_total)[:, None], b_top + tl.log(b_total)


@triton.jit
def answer_sites(
    p_row,  # [1, BLOCK], row 0 of a token
    p_query,  # [SITES, BLOCK]
    p_answer,  # [SITES, BLOCK]
    p_log_sum,  # [SITES]
    slot_stride,
    count,
    key_eps,
    m_site,
    m_d,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SITES: tl.constexpr,
):
    """Several sites attend to rows ``0..count-1`` alone."""
    m_group = m_site[:, None] & m_d  # [SITES, BLOCK]
    b_row = tl.load(p_row, mask=m_d, other=0.0)
    b_query = tl.load(p_query, mask=m_group, other=0.0)
    b_mix = tl.zeros([SITES, BLOCK], tl.float32)
    b_top = tl.full([SITES], float("-inf"), tl.float32)
    b_total = tl.zeros([SITES], tl.float32)
    b_mix, b_log_sum = attend(
        p_row, b_row, b_query, b_mix, b_top, b_total, slot_stride, count, key_eps, m_d, HIDDEN
    )
    tl.store(p_answer, b_mix.to(p_answer.dtype.element_ty), mask=m_group)
    tl.store(p_log_sum, b_log_sum, mask=m_site)


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
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SITES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # The groups of a token run side by side: the first reads its rows from HBM, the others from L2.
    groups = tl.cdiv(sites, SITES)
    token = (tl.program_id(0) // groups).to(tl.int64)
    o_site = tl.program_id(0) % groups * SITES + tl.arange(0, SITES)
    o_d = tl.arange(0, BLOCK)[None, :]
    m_d = o_d < HIDDEN
    p_row = p_bank + token * bank_stride + o_d  # [1, BLOCK]
    p_query = p_queries + o_site[:, None] * query_stride + o_d
    p_answer = p_answers + o_site[:, None] * site_stride + token * answer_stride + o_d
    p_log_sum = p_log_sums + o_site * sum_site_stride + token * sum_stride
    answer_sites(
        *(p_row, p_query, p_answer, p_log_sum, slot_stride, count, key_eps, o_site < sites, m_d),
        HIDDEN,
        BLOCK,
        SITES,
    )


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
        **launch_options(starts_early(bank.device)),
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
    first: int | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
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
        answers: ``[S, T, d]`` of ``inter_block`` or ``open_group``, in the dtype of ``delta``.
        log_sums: ``[S, T]`` beside them.
        query: ``[d]`` float32 pseudo-query of this site, folded as those of phase 1.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that holds the partial sum.
        position: which site of phase 1 this is.
        fresh: whether the partial sum begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        first: the answer stands for the rows before this one; later ones were finished after
            phase 1.  ``row`` if None: there are none.
        bias: ``[1]`` float32, added to the score of the partial sum; None for none.
        out: ``[T, d]`` result in the dtype of ``delta``, sharing memory with no other argument;
            allocated if None.

    Returns:
        ``out``.  Empty, and without a launch, if ``T`` is 0.

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
    check_site(delta, bank, query, norm_weight, bias, out, row, **read)
    if not 0 <= first <= row:
        raise ValueError(f"first {first} is outside 0..{row}, the row of the partial sum")
    if out is None:
        out = delta.new_empty(shape)
    if shape[0]:
        given = delta, bank, query, norm_weight, bias, out
        state: dict[str, Any] = {"row": row, "fresh": fresh, "first": first}
        eps = {"key_eps": key_eps, "norm_eps": norm_eps}
        launch(*given, **state, **eps, answers=(answers, log_sums), position=position)
    return out


__all__ = ["GROUP_CONFIGS", "GroupConfig", "inter_block", "merge"]
