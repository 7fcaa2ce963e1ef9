"""Phase 1 in the launch of a group's first site (arXiv 2603.15031, section 4).

A group is the sites whose attention to the finished blocks is computed at once.  The output that
arrives at its first site is added to a bank row, that site attends to all rows up to it, and the
later sites get answers over the finished blocks, from the same reading of the rows: 3 vectors and 2
launches less than an addition, a phase 1 by itself and the norm of the first site's answer.

A program owns a token, because it updates a row in place that all sites may read; it takes the
sites in turns, as many at a time as its config says.  Few tokens do not fill a GPU: then a
separate launch adds to the row, and the turns of a token are programs that run side by side.  The
binary is the same, so a token gets the same bits.  Up to 8192 it takes up to 255 registers, without
spills; at 16384 the half types spill up to 96 bytes and fp32 208.

Many tokens in bfloat16 are the work of two other launches, ``score_group`` and ``mix_group``: the
logits come from tensor cores, which sum in another order.  In vLLM's batch-invariant mode they are
not used.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton import mix_group, score_group
from attnres_serve.kernels.triton.answers import (
    answer_sites,
    attend,
    group_config_for,
    of_sites,
)
from attnres_serve.kernels.triton.common import (
    MAX_HIDDEN,
    check_bias,
    check_query,
    check_site,
    compile_once,
    entry,
    launch_options,
    starts_early,
    takes_each_token_alone,
)

# Largest hidden size -> the most tokens whose turns run side by side.  More tokens fill a GPU by
# themselves, and the launch that adds is a loss.  Measured on an H100 (docs/measure/gpu.md).
SIDE_BY_SIDE = {1024: 512, MAX_HIDDEN: 128}


class Least(NamedTuple):
    """From where on logits come from tensor cores.

    Attributes:
        logits: of the group: tokens x rows x sites.
        sites: of the group.
    """

    logits: int
    sites: int


# Largest hidden size -> from where on that was faster, or about as fast, on an H100 with 6 and 24
# sites (docs/measure/gpu.md).  8 and 16 lie between these and were not measured.
LEAST = {
    2048: Least(logits=3 << 17, sites=16),
    4096: Least(logits=3 << 15, sites=8),
    MAX_HIDDEN: Least(logits=3 << 15, sites=6),
}


# What is not specialised here: one binary serves every number of rows, sites and tokens.
@triton.jit(do_not_specialize=["sum_site_stride", "sum_stride", "row", "sites", "adds"])
def phase_1_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_queries,  # [sites, HIDDEN]
    p_weight,  # [HIDDEN]
    p_biases,  # [sites, BIASES] or None
    p_out,  # [T, HIDDEN]
    p_answers,  # [sites - 1, T, HIDDEN]
    p_log_sums,  # [sites - 1, T]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    query_stride: tl.int64,
    out_stride: tl.int64,
    site_stride: tl.int64,
    answer_stride: tl.int64,
    sum_site_stride: tl.int64,
    sum_stride: tl.int64,
    row,
    sites,  # 0: only add to the row
    adds,  # 1, or 0 if the row was added to before
    key_eps,
    norm_eps,
    FRESH: tl.constexpr,
    COMPLETES: tl.constexpr,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SITES: tl.constexpr,
    BIASES: tl.constexpr,  # the most rows that a site reads
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    o_site = tl.arange(0, SITES)
    o_d = tl.arange(0, BLOCK)[None, :]
    o_one = tl.arange(0, 1)[:, None]  # [1, 1]; the interpreter cannot mask by a scalar
    m_d = o_d < HIDDEN
    p_token = p_bank + token * bank_stride
    p_row = p_token + o_d  # [1, BLOCK]

    m_adds = (o_one < adds) & m_d  # [1, BLOCK]
    p_sum = p_token + row * slot_stride
    p_new = p_delta + token * delta_stride
    p_partial = p_sum + o_d  # [1, BLOCK]

    if sites == 0:  # the launch that only adds
        b_new = tl.load(p_new + o_d, mask=m_d, other=0.0)  # [1, BLOCK]
        if not FRESH:
            b_partial = tl.load(p_partial, mask=m_d, other=0.0)  # [1, BLOCK]
            b_new = (b_partial.to(tl.float32) + b_new.to(tl.float32)).to(b_new.dtype)
        tl.store(p_partial, b_new, mask=m_d)
    elif part == 0:  # first turn: the row just made is at hand
        m_group = (o_site < sites)[:, None] & m_d  # [SITES, BLOCK]
        b_row = tl.load(p_row, mask=(o_one < row) & m_d, other=0.0)  # [1, BLOCK]
        if FRESH:
            b_new = tl.load(tl.where(adds > 0, p_new, p_sum) + o_d, mask=m_d, other=0.0)
        else:
            b_new = tl.load(p_new + o_d, mask=m_adds, other=0.0)  # [1, BLOCK]
            b_partial = tl.load(p_partial, mask=m_d, other=0.0)  # [1, BLOCK]
            b_new = (b_partial.to(tl.float32) + b_new.to(tl.float32)).to(b_new.dtype)
        p_query = p_queries + o_site[:, None] * query_stride + o_d
        b_query = tl.load(p_query, mask=m_group, other=0.0)
        tl.store(p_partial, b_new, mask=m_adds)

        b_new = b_new.to(tl.float32)
        b_square = tl.sum(b_new * b_new, axis=1)  # [1]
        b_dot = tl.sum(b_query * b_new, axis=1)  # [SITES]
        b_top = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
        p_bias = of_sites(p_biases, o_site, sites, BIASES)
        if p_bias is not None:
            b_top += tl.load(p_bias + row)
        if COMPLETES:
            b_sum = tl.full([SITES], 1.0, tl.float32)
            b_mix = tl.zeros([SITES, BLOCK], tl.float32) + b_new
        else:  # a partial sum, which later sites will have outgrown; unused lanes stay finite
            m_partial = (o_site == 0) | (o_site >= sites)
            b_top = tl.where(m_partial, b_top, float("-inf"))
            b_sum = tl.where(m_partial, 1.0, 0.0)
            b_mix = b_sum[:, None] * b_new
        b_mix, b_log_sum = attend(
            p_row,
            b_row,
            b_query,
            b_mix,
            b_top,
            b_sum,
            p_bias,
            slot_stride,
            row,
            key_eps,
            m_d,
            HIDDEN,
        )
        p_log_sum = p_log_sums + (o_site - 1) * sum_site_stride + token * sum_stride
        p_answer = p_answers + (o_site - 1)[:, None] * site_stride + token * answer_stride + o_d
        m_later = o_site > 0
        tl.store(p_log_sum, b_log_sum, mask=m_later & (o_site < sites))
        b_answer = b_mix.to(p_answers.dtype.element_ty)
        tl.store(p_answer, b_answer, mask=m_later[:, None] & m_group)
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_first = tl.sum(tl.where(m_later[:, None], 0.0, b_mix), axis=0)[None, :]  # [1, BLOCK]
        b_square = tl.sum(b_first * b_first, axis=1)  # [1]
        b_out = b_first * tl.rsqrt(b_square * (1.0 / HIDDEN) + norm_eps)[:, None] * b_weight
        tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
        # Later turns read the new row back, as one more block: threads wait for each other's part.
        tl.debug_barrier()

    for turn in range(part if part > 0 else parts, tl.cdiv(sites, SITES), parts):
        o_turn = (turn * SITES + o_site).to(tl.int64)
        answer_sites(
            p_row,
            p_queries + o_turn[:, None] * query_stride + o_d,
            p_answers + (o_turn - 1)[:, None] * site_stride + token * answer_stride + o_d,
            p_log_sums + (o_turn - 1) * sum_site_stride + token * sum_stride,
            of_sites(p_biases, o_turn, sites, BIASES),
            slot_stride,
            row + COMPLETES,
            key_eps,
            o_turn < sites,
            m_d,
            HIDDEN,
            BLOCK,
            SITES,
        )


def turns_of(tokens: int, sites: int, hidden: int) -> int:
    """The programs of a token: one for each turn if tokens are few, else one for all of them."""
    turns = -(-sites // group_config_for(hidden).sites)
    return turns if tokens <= entry(SIDE_BY_SIDE, hidden) else 1


def by_product(tokens: int, rows: int, sites: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether the logits of a group that reads so many rows come from tensor cores."""
    least = entry(LEAST, hidden)
    several = least.sites <= sites <= score_group.MAX_SITES
    many = several and tokens * rows * sites >= least.logits
    return many and dtype == torch.bfloat16 and not takes_each_token_alone()


def phase_1(
    delta: Tensor,
    bank: Tensor,
    queries: Tensor,
    norm_weight: Tensor,
    *,
    row: int,
    fresh: bool,
    completes: bool,
    key_eps: float,
    norm_eps: float,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first site of a group as ``single_pass``, and phase 1 of its later sites.

    The state update is exact, as in ``single_pass``, and no other row is written.  Everything after
    it is in float32; a result is rounded once.  Rounding an answer to the activation dtype, of unit
    roundoff ``u``, changes a mix merged from it by at most ``(1 - w) * u * abs(answer)``, where
    ``w`` is the weight of the partial sum: together with the final rounding about two where the
    single pass has one.
    A token's results do not depend on its batch, nor a site's on the later sites of the group,
    except by the order in which logits are summed: it is another one with as many logits in
    bfloat16 and as many sites as ``LEAST`` says, and again with more than 16 sites.
    ``common.take_each_token_alone`` forbids that.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.  ``d`` is at most ``MAX_HIDDEN``, of any parity.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.  Rows
            ``0..row-1`` are finished blocks.
        queries: ``[S, d]`` float32 pseudo-queries of the group's sites in order, folded with
            key-norm weight and logit scale; any stride on sites.
        norm_weight: ``[d]`` weight of the first site's output norm, in any of the three dtypes.
        row: the row that ``delta`` is added to.
        fresh: whether that row begins here.
        completes: whether it is thereby a finished block, to which the later sites attend as well;
            else it is a partial sum, and a source of the first site only.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        biases: ``[S, row + 1]`` float32 or wider, added to the scores of the rows; None for none.

    Returns:
        The normed mix ``[T, d]`` of the first site, the normalised answers ``[S-1, T, d]`` of the
        later ones, both in the dtype of ``delta``, and their log-sum-exps ``[S-1, T]`` in float32:
        site ``i`` of the group finds its answer at position ``i - 1``.  Without a launch if ``T``
        is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, device or overlap outside this list, where later sites
            have no finished block to attend to, and on CPU tensors without the interpreter.
    """
    if queries.dim() != 2 or not queries.shape[0]:
        raise ValueError(f"queries must be [sites, hidden], not {list(queries.shape)}")
    hidden = delta.shape[-1]
    check_query("queries", queries, queries.shape[0], hidden)
    check_site(delta, bank, queries[0], norm_weight, row, queries=queries)
    check_bias(delta, biases, row + 1, queries.shape[0])
    width = 0 if biases is None else biases.stride(0)
    tokens, later = delta.shape[0], queries.shape[0] - 1
    if later and not row + completes:
        raise ValueError("row 0 is a partial sum, so later sites have no finished block to read")
    normed = delta.new_empty(delta.shape)
    # A token's sites side by side: no stride depends on the tokens, which would be another binary.
    answers = delta.new_empty((tokens, later, hidden)).transpose(0, 1)
    log_sums = queries.new_empty((tokens, later)).t()
    results = normed, answers, log_sums
    if not tokens:
        return results

    def arguments() -> dict[str, Any]:
        turn, num_warps = group_config_for(hidden)
        return {
            "p_delta": delta,
            "p_bank": bank,
            "p_queries": queries,
            "p_weight": norm_weight,
            "p_biases": biases,
            "p_out": normed,
            "p_answers": answers,
            "p_log_sums": log_sums,
            "delta_stride": delta.stride(0),
            "bank_stride": bank.stride(0),
            "slot_stride": bank.stride(1),
            "query_stride": queries.stride(0),
            "out_stride": normed.stride(0),
            "site_stride": answers.stride(0),
            "answer_stride": answers.stride(1),
            "sum_site_stride": log_sums.stride(0),
            "sum_stride": log_sums.stride(1),
            "row": row,
            "sites": queries.shape[0],
            "adds": 1,
            "key_eps": float(key_eps),
            "norm_eps": float(norm_eps),
            "FRESH": fresh,
            "COMPLETES": completes,
            "HIDDEN": hidden,
            "BLOCK": triton.next_power_of_2(hidden),
            "SITES": turn,
            "BIASES": width,
            "num_warps": num_warps,
            **launch_options(starts_early(delta.device)),
        }

    with torch.cuda.device_of(delta):
        if by_product(tokens, row + 1, later + 1, hidden, delta.dtype):
            constants = hidden, fresh, completes, width, starts_early(delta.device)
            kind = "phase_1", delta.device, norm_weight.dtype, *constants
            compile_once(phase_1_kernel, kind, arguments)
            options: dict[str, Any] = {"row": row, "fresh": fresh, "key_eps": key_eps}
            scores = score_group.score_group(delta, bank, queries, **options)
            options = {"row": row, "completes": completes, "norm_eps": norm_eps}
            mix_group.mix_group(bank, scores, norm_weight, biases, results, **options)
            return results
        values, parts = arguments(), turns_of(tokens, later + 1, hidden)
        if parts > 1:
            phase_1_kernel[(tokens, 1)](**(values | {"sites": 0}))
            values["adds"] = 0
        phase_1_kernel[(tokens, parts)](**values)
    return results


__all__ = ["phase_1"]
