"""All sites of a group mix rows whose logits are known (``score_group``).

Only the norm of the first site's mix is summed over the hidden size.  So that site has a separate
program, and those of the later sites take a part of the hidden size each.  The programs of a token
run side by side: the first to need a row reads it from HBM, the others from L2.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import MAX_HIDDEN, entry, launch_options, starts_early


class PartConfig(NamedTuple):
    """How a program is compiled: the sites that it answers, elements of each, and warps."""

    sites: int
    chunk: int
    num_warps: int


# Largest padded hidden size -> config; of 1024 and 8192 measured on an H100 (docs/measure/gpu.md).
CONFIGS = {
    512: PartConfig(sites=8, chunk=256, num_warps=1),
    1024: PartConfig(sites=8, chunk=1024, num_warps=4),
    2048: PartConfig(sites=8, chunk=512, num_warps=2),
    8192: PartConfig(sites=8, chunk=1024, num_warps=4),
    MAX_HIDDEN: PartConfig(sites=8, chunk=2048, num_warps=8),
}


# What is not specialised here: one binary serves every number of rows, sites and tokens.
@triton.jit(do_not_specialize=["sum_site_stride", "sum_stride", "row", "sites"])
def weigh_group_kernel(
    p_scores,  # [T, row + 1, room for sites]; weights afterwards
    p_biases,  # [sites, BIASES] or None
    p_log_sums,  # [sites - 1, T]
    token_stride: tl.int64,
    row_stride: tl.int64,
    sum_site_stride: tl.int64,
    sum_stride: tl.int64,
    row,
    sites,
    COMPLETES: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
    SITES: tl.constexpr,
    BIASES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    o_slot, o_site = tl.arange(0, SLOTS)[:, None], tl.arange(0, SITES)[None, :]
    later = sites - 1  # the first site comes last
    p_score = p_scores + token * token_stride + o_slot * row_stride + o_site
    m_known = (o_slot <= row) & (o_site < sites)
    if not COMPLETES:  # a partial sum is a source of the first site only
        m_known = m_known & ((o_slot < row) | (o_site == later))
    b_score = tl.load(p_score, mask=m_known, other=float("-inf"))
    if p_biases is not None:
        o_group = tl.where(o_site < later, o_site + 1, 0)
        b_score += tl.load(p_biases + o_group * BIASES + o_slot, mask=m_known, other=0.0)
    b_top = tl.max(b_score, axis=0)[None, :]
    b_top = tl.where(o_site < sites, b_top, 0.0)  # unused lanes stay finite
    b_weight = tl.exp(b_score - b_top)
    b_total = tl.sum(b_weight, axis=0)[None, :]
    b_total = tl.where(o_site < sites, b_total, 1.0)
    tl.debug_barrier()  # what is overwritten others may have to read yet
    # Zeros for sites that are none: the next launch reads several at a time.
    tl.store(p_score, b_weight * (1.0 / b_total), mask=(o_slot <= row) & (o_site < row_stride))
    p_log_sum = p_log_sums + o_site * sum_site_stride + token * sum_stride
    tl.store(p_log_sum, b_top + tl.log(b_total), mask=o_site < later)


@triton.jit(do_not_specialize=["row", "later", "parts", "chunks"])
def mix_group_kernel(
    p_bank,  # [T, slots, HIDDEN]
    p_weights,  # [T, row + 1, room for sites]
    p_norm,  # [HIDDEN]
    p_out,  # [T, HIDDEN]
    p_answers,  # [sites - 1, T, HIDDEN]
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    out_stride: tl.int64,
    site_stride: tl.int64,
    answer_stride: tl.int64,
    row,
    later,
    parts,
    chunks,
    norm_eps,
    COMPLETES: tl.constexpr,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SITES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    o_next = 1 + tl.arange(0, 1)  # [1]; the interpreter cannot mask by a scalar
    p_token = p_bank + token * bank_stride
    p_weight = p_weights + token * token_stride

    if part == 0:  # the first site
        o_d = tl.arange(0, BLOCK)
        m_d = o_d < HIDDEN
        p_row = p_token + o_d
        b_row = tl.load(p_row, mask=m_d, other=0.0)  # [BLOCK]
        b_mix = tl.zeros([BLOCK], tl.float32)
        for index in range(0, row + 1):
            b_source = b_row.to(tl.float32)
            p_row += slot_stride
            # As in the single pass, a row is requested a round before its use.
            b_row = tl.load(p_row, mask=(index + o_next <= row) & m_d, other=0.0)
            b_mix += tl.load(p_weight + later) * b_source
            p_weight += row_stride
        b_norm = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
        square = tl.sum(b_mix * b_mix, axis=0)
        b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_norm
        tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
    else:
        count = row + COMPLETES
        o_site = (part - 1) // chunks * SITES + tl.arange(0, SITES)
        o_part = (part - 1) % chunks * CHUNK + tl.arange(0, CHUNK)[None, :]
        m_part = o_part < HIDDEN
        p_rows = p_token + o_part  # [1, CHUNK]
        b_rows = tl.load(p_rows, mask=m_part, other=0.0)
        b_answer = tl.zeros([SITES, CHUNK], tl.float32)
        for index in range(0, count):
            b_sources = b_rows.to(tl.float32)
            p_rows += slot_stride
            b_rows = tl.load(p_rows, mask=(index + o_next < count)[:, None] & m_part, other=0.0)
            b_answer += tl.load(p_weight + o_site)[:, None] * b_sources
            p_weight += row_stride
        p_answer = p_answers + o_site.to(tl.int64)[:, None] * site_stride
        p_answer += token * answer_stride + o_part  # [SITES, CHUNK]
        b_answer = b_answer.to(p_answers.dtype.element_ty)
        tl.store(p_answer, b_answer, mask=(o_site < later)[:, None] & m_part)


def config_for(hidden_size: int) -> PartConfig:
    """The config of a hidden size, at most ``MAX_HIDDEN``."""
    return entry(CONFIGS, hidden_size)


def mix_group(
    bank: Tensor,
    scores: Tensor,
    norm_weight: Tensor,
    biases: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    *,
    row: int,
    completes: bool,
    norm_eps: float,
) -> None:
    """Write the results of ``phase_1`` from logits, on the current device.

    Arguments except ``scores`` are those of ``phase_1``, which checks them.

    Args:
        scores: of ``score_group``; afterwards the weights of the rows.
    """
    out, answers, log_sums = results
    tokens, later, hidden = bank.shape[0], answers.shape[0], bank.shape[2]
    padded = triton.next_power_of_2(bank.shape[1]), triton.next_power_of_2(scores.shape[2])
    options = launch_options(starts_early(bank.device))
    weigh = {
        "p_scores": scores,
        "p_biases": biases,
        "p_log_sums": log_sums,
        "token_stride": scores.stride(0),
        "row_stride": scores.stride(1),
        "sum_site_stride": log_sums.stride(0),
        "sum_stride": log_sums.stride(1),
        "row": row,
        "sites": 1 + later,
        "COMPLETES": completes,
        "SLOTS": padded[0],
        "SITES": padded[1],
        "BIASES": 0 if biases is None else biases.stride(0),
        "num_warps": min(8, max(1, padded[0] * padded[1] // 1024)),  # a thread has 32 or fewer
        **options,
    }
    config = config_for(hidden)
    chunks = -(-hidden // config.chunk)
    parts = 1 + chunks * -(-later // config.sites)
    mix = {
        "p_bank": bank,
        "p_weights": scores,
        "p_norm": norm_weight,
        "p_out": out,
        "p_answers": answers,
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "token_stride": scores.stride(0),
        "row_stride": scores.stride(1),
        "out_stride": out.stride(0),
        "site_stride": answers.stride(0),
        "answer_stride": answers.stride(1),
        "row": row,
        "later": later,
        "parts": parts,
        "chunks": chunks,
        "norm_eps": float(norm_eps),
        "COMPLETES": completes,
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "CHUNK": config.chunk,
        "SITES": config.sites,
        "num_warps": config.num_warps,
        **options,
    }
    weigh_group_kernel[(tokens,)](**weigh)
    mix_group_kernel[(tokens * parts,)](**mix)
