"""Logits of all sites of a group for all rows that they read, by one product on tensor cores.

With many tokens ``phase_1`` is bound by its reductions: every site sums over every row of every
token.  All these sums are one product of rows and queries.  So the rows are read once more, for the
logits alone, and ``mix_group`` then knows all weights before it reads a row.

A bfloat16 row times a query is exact in float32 where the query is cut into three bfloat16 parts,
of 8 bits each; the sums are in float32.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import (
    INTERPRETED,
    capability,
    entry,
    launch_options,
    starts_early,
)

_INTERPRETED = tl.constexpr(INTERPRETED)
# The most sites that a program scores; it forms the row of its tokens, so none may take the others.
MAX_SITES = 64
ROOM = 16  # of so many sites: strides are then known to be multiples of 16, and loads are wide


class ProductConfig(NamedTuple):
    """How a scoring program is compiled: its tokens, elements of a round, and warps."""

    tokens: int
    chunk: int
    num_warps: int


# Most sites, padded -> config on sm_90; up to 32 measured on an H100 (docs/measure/gpu.md).  Of 17
# to 32 sites a thread spills up to 104 bytes, and with 24 phase 1 took 0.69 to 1.01 of the time
# that it takes by the config below, which then spills none.  Of 33 sites or more that one spills up
# to 72.  With four warps Triton would take sm_90's product of whole warp groups: of 64 tokens
# by 64 elements it was a tenth faster.
CONFIGS = {
    16: ProductConfig(tokens=32, chunk=64, num_warps=2),
    32: ProductConfig(tokens=32, chunk=128, num_warps=2),
    MAX_SITES: ProductConfig(tokens=64, chunk=32, num_warps=2),
}
# Other GPUs were not measured.  Of 17 to 32 sites the entry above spills up to 264 bytes there
# (sm_120), and none of these spills on sm_80, 89, 100 or 120.
OTHER_CONFIGS = {sites: CONFIGS[sites] for sites in (16, MAX_SITES)}


def padded_sites(sites: int) -> int:
    """The columns of a program's product."""
    columns: int = triton.next_power_of_2(sites)
    return max(8, columns)


def config_for(sites: int, at: tuple[int, int] | None) -> ProductConfig:
    """The config of a number of sites, at most ``MAX_SITES``, at a compute capability."""
    return entry(CONFIGS if at == (9, 0) else OTHER_CONFIGS, sites)


def room_for(sites: int) -> int:
    """Columns of the logits of so many sites."""
    return -(-sites // ROOM) * ROOM


@triton.jit
def _cut(b_number):
    """The first 8 bits of float32 numbers as bfloat16 ones, and the rest in float32.

    Exact above 2^-110: three parts then hold all 24 bits.
    """
    b_bits = b_number.to(tl.uint32, bitcast=True)
    b_first = (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return b_first, b_number - (b_bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(b_sum, b_row, b_part):
    if _INTERPRETED:  # its product takes bfloat16 for integers, and sums in no fixed order
        b_sum += tl.sum(b_row.to(tl.float32)[:, :, None] * b_part.to(tl.float32)[None], axis=1)
    else:
        b_sum = tl.dot(b_row, b_part, b_sum)
    return b_sum


# What is not specialised here: one binary serves every number of rows and tokens.
@triton.jit(do_not_specialize=["row", "tokens", "sites"])
def score_group_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_queries,  # [sites, HIDDEN]
    p_scores,  # [T, row + 1, room for sites]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    query_stride: tl.int64,
    token_stride: tl.int64,
    row_stride: tl.int64,
    row,
    tokens,
    sites,
    key_eps,
    FRESH: tl.constexpr,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SITES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    index = row - tl.program_id(0)  # the row that takes longest begins first
    o_token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    o_site = tl.arange(0, SITES)
    o_d = tl.arange(0, CHUNK)
    m_token, m_site = o_token < tokens, o_site < sites
    p_row = p_bank + o_token[:, None] * bank_stride + index * slot_stride + o_d[None, :]
    p_query = p_queries + o_site[None, :] * query_stride + o_d[:, None]  # [CHUNK, SITES]
    if index == row:
        p_new = p_delta + o_token[:, None] * delta_stride + o_d[None, :]
        p_partial = p_row
        for begin in range(0, HIDDEN, CHUNK):
            m_partial = m_token[:, None] & (begin + o_d < HIDDEN)[None, :]  # [TOKENS, CHUNK]
            b_new = tl.load(p_new, mask=m_partial, other=0.0)
            if not FRESH:
                b_partial = tl.load(p_partial, mask=m_partial, other=0.0)
                b_new = (b_partial.to(tl.float32) + b_new.to(tl.float32)).to(b_new.dtype)
            tl.store(p_partial, b_new, mask=m_partial)
            p_new += CHUNK
            p_partial += CHUNK
        tl.debug_barrier()  # below, threads read what others have stored

    b_dot = tl.zeros([TOKENS, SITES], tl.float32)
    b_square = tl.zeros([TOKENS, CHUNK], tl.float32)
    for begin in range(0, HIDDEN, CHUNK):
        m_d = begin + o_d < HIDDEN
        b_row = tl.load(p_row, mask=m_token[:, None] & m_d[None, :], other=0.0)
        b_query = tl.load(p_query, mask=m_d[:, None] & m_site[None, :], other=0.0)
        b_high, b_rest = _cut(b_query)
        b_middle, b_rest = _cut(b_rest)
        b_low, _ = _cut(b_rest)
        # Tensor cores cut off where others round, so a sum on them is short.
        b_short = tl.zeros([TOKENS, SITES], tl.float32)
        b_short = _add_product(b_short, b_row, b_low)
        b_short = _add_product(b_short, b_row, b_middle)
        b_dot += _add_product(b_short, b_row, b_high)
        b_source = b_row.to(tl.float32)
        b_square += b_source * b_source
        p_row += CHUNK
        p_query += CHUNK
    b_scale = tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / HIDDEN) + key_eps)  # [TOKENS]
    # The first site comes last: the others are then read several at a time, from the first column.
    o_column = tl.where(o_site > 0, o_site, sites) - 1
    p_score = p_scores + o_token[:, None] * token_stride + index * row_stride + o_column[None, :]
    tl.store(p_score, b_dot * b_scale[:, None], mask=m_token[:, None] & m_site[None, :])


def score_group(
    delta: Tensor,
    bank: Tensor,
    queries: Tensor,
    *,
    row: int,
    fresh: bool,
    key_eps: float,
) -> Tensor:
    """Add ``delta`` to row ``row`` and score rows ``0..row``, on the current device.

    Arguments are those of ``phase_1``, which checks them.

    Returns:
        Logits ``[T, row + 1, R]`` in float32, without the bias; the first site's are the last of
        ``S``.  ``R`` is ``room_for(S)``; nothing is written behind ``S``.
    """
    tokens, sites = delta.shape[0], queries.shape[0]
    scores = queries.new_empty((tokens, row + 1, room_for(sites)))
    config = config_for(sites, capability(delta.device))
    arguments = {
        "p_delta": delta,
        "p_bank": bank,
        "p_queries": queries,
        "p_scores": scores,
        "delta_stride": delta.stride(0),
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "query_stride": queries.stride(0),
        "token_stride": scores.stride(0),
        "row_stride": scores.stride(1),
        "row": row,
        "tokens": tokens,
        "sites": sites,
        "key_eps": float(key_eps),
        "FRESH": fresh,
        "HIDDEN": delta.shape[1],
        "TOKENS": config.tokens,
        "CHUNK": config.chunk,
        "SITES": padded_sites(sites),
        "num_warps": config.num_warps,
        **launch_options(starts_early(delta.device)),
    }
    score_group_kernel[(row + 1, -(-tokens // config.tokens))](**arguments)
    return scores
