"""Score on write: a row's logits for all later sites are computed once, when the row is finished.

Pseudo-queries do not depend on the input (arXiv 2603.15031, section 4), so nothing has to be known
about a later site but its query.  This runs just before the first site that finds more rows
finished than were scored (``mix_scored``).

Names: ``p_`` pointers, ``o_`` offsets, ``m_`` masks, ``b_`` values a program holds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_serve.kernels.triton.common import (
    MAX_HIDDEN,
    check_activations,
    check_hidden,
    check_memory,
    check_query,
    entry,
    launch_options,
    starts_early,
)
from attnres_serve.kernels.triton.two_phase import GroupConfig

# Largest padded hidden size -> the sites whose queries a scoring program holds, and warps.  Chosen
# from compile_ahead, not from a measured run: at most 128 registers, and no spills at any size.
# ``mix_scored`` takes the single pass's configs and needs two thirds of its registers: at every
# size up to 8192 two programs or more fit on an SM (fp16 spills 8 bytes from 512 to 4096 on sm_80).
SCORE_CONFIGS = {
    256: GroupConfig(sites=4, num_warps=1),
    512: GroupConfig(sites=4, num_warps=2),
    1024: GroupConfig(sites=4, num_warps=4),
    2048: GroupConfig(sites=4, num_warps=8),
    8192: GroupConfig(sites=4, num_warps=16),
    MAX_HIDDEN: GroupConfig(sites=2, num_warps=16),
}

# Programs of a scoring launch, about: enough for every warp of a large GPU.  With more tokens and
# sites than that, a program keeps its queries and takes several tokens in turn, because a query is
# twice as large as a row of halves and would else be read (from L2) for every token.
SCORE_PROGRAMS = 2048


# What is not specialised here: one binary serves every number of rows, sites and tokens, and every
# place in the scores.
@triton.jit(
    do_not_specialize=["first", "tokens", "sites", "span"],
    do_not_specialize_on_alignment=["p_scores"],
)
def score_kernel(
    p_bank,  # [T, slots, HIDDEN]
    p_queries,  # [sites, HIDDEN]
    p_scores,  # [T, sites, slots]
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    query_stride: tl.int64,
    token_stride: tl.int64,
    site_stride: tl.int64,
    score_stride: tl.int64,
    first,
    tokens,
    sites,
    span,
    key_eps,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SITES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # The groups of the same tokens run side by side: one reads a row from HBM, the others from L2.
    groups = tl.cdiv(sites, SITES)
    begin = tl.program_id(0) // groups * span
    end = tl.minimum(begin + span, tokens)
    row = first + tl.program_id(1)
    o_site = (tl.program_id(0) % groups * SITES + tl.arange(0, SITES)).to(tl.int64)
    o_d = tl.arange(0, BLOCK)[None, :]
    o_next = 1 + tl.arange(0, 1)[:, None]  # [1, 1]; the interpreter cannot mask by a scalar
    m_d = o_d < HIDDEN
    m_site = o_site < sites
    p_query = p_queries + o_site[:, None] * query_stride + o_d  # [SITES, BLOCK]
    p_score = p_scores + begin.to(tl.int64) * token_stride + o_site * site_stride
    p_score += row * score_stride  # [SITES]

    p_row = p_bank + begin.to(tl.int64) * bank_stride + row * slot_stride + o_d  # [1, BLOCK]
    b_row = tl.load(p_row, mask=m_d, other=0.0)
    b_query = tl.load(p_query, mask=m_site[:, None] & m_d, other=0.0)  # [SITES, BLOCK]
    for token in range(begin, end):
        b_source = b_row.to(tl.float32)  # [1, BLOCK]
        # As in the single pass, what the next round needs is requested early.
        p_row += bank_stride
        b_row = tl.load(p_row, mask=(token + o_next < end) & m_d, other=0.0)
        b_square = tl.sum(b_source * b_source, axis=1)  # [1]
        b_dot = tl.sum(b_query * b_source, axis=1)  # [SITES]
        b_score = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
        tl.store(p_score, b_score, mask=m_site)
        p_score += token_stride


def score_arguments(
    bank: Tensor,
    queries: Tensor,
    scores: Tensor,
    *,
    first: int,
    key_eps: float,
    config: GroupConfig | None = None,
) -> dict[str, Any]:
    """Everything a launch passes to the kernel; also what an ahead-of-time compilation needs."""
    tokens, _, hidden = bank.shape
    count = queries.shape[0]
    sites, num_warps = config or entry(SCORE_CONFIGS, hidden)
    return {
        "p_bank": bank,
        "p_queries": queries,
        "p_scores": scores,
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "query_stride": queries.stride(0),
        "token_stride": scores.stride(0),
        "site_stride": scores.stride(1),
        "score_stride": scores.stride(2),
        "first": first,
        "tokens": tokens,
        "sites": count,
        "span": -(-tokens * -(-count // sites) // SCORE_PROGRAMS),
        "key_eps": float(key_eps),
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "SITES": sites,
        "num_warps": num_warps,
        **launch_options(starts_early(bank.device)),
    }


def score_rows(
    bank: Tensor,
    queries: Tensor,
    scores: Tensor,
    *,
    first: int,
    count: int,
    key_eps: float,
    config: GroupConfig | None = None,
) -> Tensor:
    """Logits of finished rows, for all sites that will read them.

    In float32; a logit does not depend on what else is computed with it.

    Args:
        bank: ``[T, slots, d]`` float32, float16 or bfloat16; any strides on tokens and slots.
            ``d`` is at most ``MAX_HIDDEN``, of any parity.
        queries: ``[S, d]`` float32 pseudo-queries of the sites, folded with key-norm weight and
            logit scale; any stride on sites.
        scores: ``[T, S, slots]`` float32, of any strides, sharing no memory with another argument;
            of it ``[:, :, first : first + count]`` is written.
        first: the first row that is scored.
        count: how many are.
        key_eps: epsilon of the key norm.
        config: compilation parameters in place of ``SCORE_CONFIGS``, for measurements.

    Returns:
        ``scores``.  Without a launch if ``S`` or ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, device or overlap outside this list, and on CPU
            tensors without the interpreter.
    """
    if bank.dim() != 3:
        raise ValueError(f"bank must be [tokens, slots, hidden], not {list(bank.shape)}")
    check_activations("bank", bank)
    tokens, slots, hidden = bank.shape
    check_hidden(hidden)
    if queries.dim() != 2:
        raise ValueError(f"queries must be [sites, hidden], not {list(queries.shape)}")
    sites = queries.shape[0]
    check_query("queries", queries, sites, hidden)
    _check_scores(scores, tokens)
    if scores.shape[1] != sites:
        raise ValueError(f"scores {list(scores.shape)} are not for {sites} sites")
    rows = min(slots, scores.shape[2])
    if first < 0 or count < 1 or first + count > rows:
        raise ValueError(f"rows {first}..{first + count - 1} are outside the {rows} slots")
    check_memory({"bank": bank, "queries": queries}, results={"scores": scores.unsqueeze(-1)})
    if tokens and sites:
        arguments = score_arguments(
            bank, queries, scores, first=first, key_eps=key_eps, config=config
        )
        groups = -(-sites // arguments["SITES"])
        with torch.cuda.device_of(bank):
            score_kernel[(groups * -(-tokens // arguments["span"]), count)](**arguments)
    return scores


def _check_scores(scores: Tensor, tokens: int) -> None:
    if scores.dim() != 3 or scores.shape[0] != tokens or scores.dtype != torch.float32:
        raise ValueError(
            f"scores must be [{tokens}, sites, slots] torch.float32, "
            f"not {list(scores.shape)} {scores.dtype}"
        )


__all__ = ["score_rows"]
