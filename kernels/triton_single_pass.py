"""One site of depth attention in one Triton launch (arXiv 2603.15031, sections 3 and 4).

A program owns a token: it adds the sublayer's output to the partial sum, writes that bank row,
mixes all rows by online softmax and norms the mix.  Names: ``p_`` pointers, ``o_`` offsets, ``m_``
masks, ``b_`` values a program holds.  ``TRITON_INTERPRET=1``, set before Triton is imported, runs
it on CPU.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Config(NamedTuple):
    """How a program is compiled: source rows loaded together, and warps."""

    tile: int
    num_warps: int


# Largest padded hidden size -> config; constants, because serving must not tune while it runs.
# Chosen from benchmarks/compile_ahead.py, not from a measured run: at least one 128-bit load of
# bf16 per thread and row (padded size >= 256 * warps), no spills up to 8192 in any dtype on sm_80,
# 90 and 100, and as many programs per SM as keep about 25 KB of loads in flight (HBM latency x
# bandwidth / SMs).  At 7168 on sm_90 a second row in flight takes over 200 registers and leaves one
# program per SM; a single row takes 128 and leaves two (on sm_80 and sm_100 one).  At 16384 the
# half types spill up to 16 bytes and fp32 up to 80; larger sizes are refused.
# One config for all T: what a token gets does not depend on its batch.
CONFIGS = {
    256: Config(tile=2, num_warps=1),
    512: Config(tile=2, num_warps=2),
    2048: Config(tile=2, num_warps=4),
    4096: Config(tile=2, num_warps=8),
    8192: Config(tile=1, num_warps=8),
    16384: Config(tile=1, num_warps=16),
}
MAX_HIDDEN = max(CONFIGS)


def config_for(hidden_size: int) -> Config:
    """The config of a hidden size, at most ``MAX_HIDDEN``."""
    return CONFIGS[min(limit for limit in CONFIGS if hidden_size <= limit)]


# row is not specialised: one binary serves every number of sources.
@triton.jit(do_not_specialize=["row"])
def single_pass_kernel(
    p_delta,  # [T, HIDDEN]
    p_bank,  # [T, slots, HIDDEN]
    p_query,  # [HIDDEN]
    p_weight,  # [HIDDEN]
    p_out,  # [T, HIDDEN]
    delta_stride: tl.int64,
    bank_stride: tl.int64,
    slot_stride: tl.int64,
    out_stride: tl.int64,
    row,
    key_eps,
    norm_eps,
    FRESH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    o_s = tl.arange(0, TILE)
    m_d = o_d < HIDDEN
    p_rows = p_bank + token * bank_stride + o_d  # [BLOCK]
    p_own = p_rows + row * slot_stride  # [BLOCK]
    p_tile = p_rows[None, :] + o_s[:, None] * slot_stride  # [TILE, BLOCK]

    # The first tile is requested here and each later one a round early: loads overlap reductions.
    b_tile = tl.load(p_tile, mask=(o_s < row)[:, None] & m_d[None, :], other=0.0)
    b_own = tl.load(p_delta + token * delta_stride + o_d, mask=m_d, other=0.0)  # [BLOCK]
    if not FRESH:
        b_partial = tl.load(p_own, mask=m_d, other=0.0)  # [BLOCK]
        b_own = (b_partial.to(tl.float32) + b_own.to(tl.float32)).to(b_own.dtype)
    b_query = tl.load(p_query + o_d, mask=m_d, other=0.0)  # [BLOCK]
    tl.store(p_own, b_own, mask=m_d)

    b_mix = b_own.to(tl.float32)  # [BLOCK]
    # Joined, the two sums of a row share the barriers of one reduction.
    square, dot = tl.split(tl.sum(tl.join(b_mix * b_mix, b_mix * b_query), axis=0))
    top = dot * tl.rsqrt(square * (1.0 / HIDDEN) + key_eps)
    total = 1.0
    for first in range(0, row, TILE):
        b_source = b_tile.to(tl.float32)  # [TILE, BLOCK]
        p_tile += TILE * slot_stride
        m_next = first + TILE + o_s < row
        b_tile = tl.load(p_tile, mask=m_next[:, None] & m_d[None, :], other=0.0)
        b_products = tl.join(b_source * b_source, b_source * b_query[None, :])
        b_square, b_dot = tl.split(tl.sum(b_products, axis=1))  # [TILE] each
        b_score = b_dot * tl.rsqrt(b_square * (1.0 / HIDDEN) + key_eps)
        b_score = tl.where(first + o_s < row, b_score, float("-inf"))
        new_top = tl.maximum(top, tl.max(b_score, axis=0))
        scale = tl.exp(top - new_top)
        b_share = tl.exp(b_score - new_top)  # [TILE]
        total = total * scale + tl.sum(b_share, axis=0)
        b_mix = b_mix * scale + tl.sum(b_share[:, None] * b_source, axis=0)
        top = new_top

    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK]
    b_mix = b_mix * (1.0 / total)
    square = tl.sum(b_mix * b_mix, axis=0)
    b_out = b_mix * tl.rsqrt(square * (1.0 / HIDDEN) + norm_eps) * b_weight
    tl.store(p_out + token * out_stride + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two index tuples of a strided view may name the same element."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte address of a view that is not empty."""
    last = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() - 1


def _check(
    delta: Tensor, bank: Tensor, query: Tensor, norm_weight: Tensor, out: Tensor | None, row: int
) -> None:
    """Raise on the first contract that the arguments of a launch break."""
    if delta.dim() != 2 or bank.dim() != 3:
        raise ValueError(
            "delta must be [tokens, hidden] and bank [tokens, slots, hidden], "
            f"not {list(delta.shape)} and {list(bank.shape)}"
        )
    tokens, hidden = delta.shape
    if bank.shape[0] != tokens or bank.shape[2] != hidden:
        raise ValueError(f"bank {list(bank.shape)} does not fit delta {list(delta.shape)}")
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden} is outside 1..{MAX_HIDDEN}")
    if not 0 <= row < bank.shape[1]:
        raise ValueError(f"row {row} is outside the {bank.shape[1]} slots of the bank")
    if delta.dtype not in DTYPES:
        raise TypeError(f"delta is {delta.dtype}, not float32, float16 or bfloat16")
    if bank.dtype != delta.dtype:
        raise TypeError(f"bank is {bank.dtype} but delta is {delta.dtype}")
    if query.dtype != torch.float32:
        raise TypeError(f"query is {query.dtype}; it is folded with the key norm in float32")
    if norm_weight.dtype not in DTYPES:
        raise TypeError(f"norm_weight is {norm_weight.dtype}, not float32, float16 or bfloat16")
    named = {"delta": delta, "bank": bank, "query": query, "norm_weight": norm_weight}
    if out is not None:
        named["out"] = out
        if out.shape != delta.shape or out.dtype != delta.dtype:
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype} but delta is {list(delta.shape)} "
                f"{delta.dtype}"
            )
    for name, tensor in named.items():
        if name in ("query", "norm_weight") and tensor.shape != (hidden,):
            raise ValueError(f"{name} is {list(tensor.shape)}, not [{hidden}]")
        if tensor.device != delta.device:
            raise ValueError(f"{name} is on {tensor.device} but delta on {delta.device}")
        if hidden > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have unit stride on the hidden dimension")
        if name in ("bank", "out") and _overlaps_itself(tensor):
            raise ValueError(f"{name} is written and its rows overlap in memory")
    if out is not None and tokens:
        first, last = _span(out)
        for name in ("delta", "bank"):
            start, end = _span(named[name])
            if first <= end and start <= last:
                raise ValueError(f"out must not share memory with {name}")
    if delta.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "Triton has no CPU backend: use the torch path, or set TRITON_INTERPRET=1 before "
            "Triton is imported"
        )


def launch_arguments(
    delta: Tensor,
    bank: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    out: Tensor,
    *,
    row: int,
    fresh: bool,
    key_eps: float,
    norm_eps: float,
    config: Config | None = None,
) -> dict[str, Any]:
    """Everything a launch passes to the kernel; also what an ahead-of-time compilation needs."""
    hidden = delta.shape[1]
    tile, num_warps = config or config_for(hidden)
    return {
        "p_delta": delta,
        "p_bank": bank,
        "p_query": query,
        "p_weight": norm_weight,
        "p_out": out,
        "delta_stride": delta.stride(0),
        "bank_stride": bank.stride(0),
        "slot_stride": bank.stride(1),
        "out_stride": out.stride(0),
        "row": row,
        "key_eps": float(key_eps),
        "norm_eps": float(norm_eps),
        "FRESH": fresh,
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "TILE": tile,
        "num_warps": num_warps,
        "enable_fp_fusion": True,  # the default of Triton up to 3.9 and not of 3.10
    }


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
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """One whole site: update bank row ``row`` in place, mix rows ``0..row``, norm the mix.

    The state update is exact: ``bank[:, row]`` becomes ``delta`` where the row is fresh, else
    ``bank[:, row] + delta`` as torch computes it.  Later rows are neither read nor written.
    Scores, softmax, mix and norm are in float32 with one rounding into the result.

    Args:
        delta: ``[T, d]`` output of the previous sublayer, float32, float16 or bfloat16; any token
            stride.  ``d`` is at most ``MAX_HIDDEN``, of any parity.
        bank: ``[T, slots, d]`` in the dtype of ``delta``; any strides on tokens and slots.
        query: ``[d]`` float32 pseudo-query, already multiplied by the key-norm weight.
        norm_weight: ``[d]`` weight of the output norm, in any of the three dtypes.
        row: the row that holds the partial sum; ``row + 1`` rows are mixed.
        fresh: whether a block begins here.
        key_eps, norm_eps: epsilons of the key norm and of the output norm.
        out: ``[T, d]`` result in the dtype of ``delta``, sharing memory with neither delta nor
            bank; allocated if None.
        config: compilation parameters in place of ``config_for(d)``, for measurements.

    Returns:
        ``out``.  Empty, and without a launch, if ``T`` is 0.

    Raises:
        TypeError: on a dtype outside this list.
        ValueError: on a shape, stride, row, device or overlap outside this list, and on CPU tensors
            without the interpreter.
    """
    _check(delta, bank, query, norm_weight, out, row)
    if out is None:
        out = delta.new_empty(delta.shape)
    if delta.shape[0]:
        arguments = launch_arguments(
            delta,
            bank,
            query,
            norm_weight,
            out,
            row=row,
            fresh=fresh,
            key_eps=key_eps,
            norm_eps=norm_eps,
            config=config,
        )
        with torch.cuda.device_of(delta):
            single_pass_kernel[(delta.shape[0],)](**arguments)
    return out


__all__ = ["CONFIGS", "INTERPRETED", "MAX_HIDDEN", "Config", "config_for", "single_pass"]
