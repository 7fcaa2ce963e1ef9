"""Several sites of a group attend to the same rows: a turn of a program of phase 1.

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attnres_serve.kernels.triton.common import MAX_HIDDEN, entry


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
def of_sites(p_biases, o_site, sites, BIASES: tl.constexpr):
    """Where the biases of sites begin, or None; lanes of no site share the first one's."""
    return None if p_biases is None else p_biases + tl.where(o_site < sites, o_site, 0) * BIASES


@triton.jit
def attend(
    p_row,  # [1, BLOCK], row 0 of a token
    b_row,  # [1, BLOCK], what is there: it was requested early
    b_query,  # [SITES, BLOCK]
    b_mix,  # [SITES, BLOCK]
    b_top,  # [SITES]
    b_sum,  # [SITES]
    p_bias,  # [SITES], of row 0; or None
    slot_stride,
    count,
    key_eps,
    m_d,
    HIDDEN: tl.constexpr,
):
    """Online softmax of several sites over rows ``0..count-1``; mix, top and sum go on."""
    o_next = 1 + tl.arange(0, 1)[:, None]  # [1, 1]; the interpreter cannot mask by a scalar
    for index in range(0, count):
        b_source = b_row.to(tl.float32)  # [1, BLOCK]
        p_row += slot_stride
        # As in the single pass, a row is requested a round before its use.
        b_row = tl.load(p_row, mask=(index + o_next < count) & m_d, other=0.0)
        b_square = tl.sum(b_source * b_source, axis=1)  # [1]
        b_dot = tl.sum(b_query * b_source, axis=1)  # [SITES]
        b_score = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
        if p_bias is not None:
            b_score += tl.load(p_bias + index)
        b_new_top = tl.maximum(b_top, b_score)
        b_scale = tl.exp(b_top - b_new_top)
        b_share = tl.exp(b_score - b_new_top)
        b_sum = b_sum * b_scale + b_share
        b_mix = b_mix * b_scale[:, None] + b_share[:, None] * b_source
        b_top = b_new_top
    return b_mix * (1.0 / b_sum)[:, None], b_top + tl.log(b_sum)


@triton.jit
def answer_sites(
    p_row,  # [1, BLOCK], row 0 of a token
    p_query,  # [SITES, BLOCK]
    p_answer,  # [SITES, BLOCK]
    p_log_sum,  # [SITES]
    p_bias,  # [SITES], of row 0; or None
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
    b_sum = tl.zeros([SITES], tl.float32)
    b_mix, b_log_sum = attend(
        p_row, b_row, b_query, b_mix, b_top, b_sum, p_bias, slot_stride, count, key_eps, m_d, HIDDEN
    )
    tl.store(p_answer, b_mix.to(p_answer.dtype.element_ty), mask=m_group)
    tl.store(p_log_sum, b_log_sum, mask=m_site)
