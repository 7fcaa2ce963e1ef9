"""Addition and norm of a model without depth attention, as one Triton kernel of a token a program.

It is what a site is compared with.  A compiler makes the like of it: inductor fuses the two.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from benchmarks.kernels import compile_ahead
from benchmarks.kernels.model import issue, machine, sass
from benchmarks.kernels.model.launches import ARCH, DTYPE, Binary, seconds_of
from benchmarks.kernels.model.machine import Gpu


@triton.jit
def add_norm_kernel(
    p_delta,  # [T, HIDDEN]
    p_sum,  # [T, HIDDEN]
    p_weight,  # [HIDDEN]
    p_out,  # [T, HIDDEN]
    eps,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < HIDDEN
    o_token = token * HIDDEN + o_d
    b_sum = tl.load(p_delta + o_token, mask=m_d, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_sum += tl.load(p_sum + o_token, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_sum + o_token, b_sum.to(p_sum.dtype.element_ty), mask=m_d)
    square = tl.sum(b_sum * b_sum, axis=0)
    b_out = b_sum * tl.rsqrt(square * (1.0 / HIDDEN) + eps) * b_weight
    tl.store(p_out + o_token, b_out.to(p_out.dtype.element_ty), mask=m_d)


@cache
def binary(hidden: int, num_warps: int) -> Binary:
    vectors = torch.empty(2, hidden, dtype=DTYPE, device="meta")
    arguments = {
        **{"p_delta": vectors, "p_sum": vectors, "p_weight": vectors[0], "p_out": vectors},
        **{"eps": 1e-6, "HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden)},
        "num_warps": num_warps,
        **compile_ahead.common.launch_options(True),
    }
    source, target, options = compile_ahead.specialise(add_norm_kernel, arguments, ARCH)
    return Binary.of(triton.compile(source, target=target, options=options), {})


def seconds(hidden: int, tokens: int, gpu: Gpu) -> float:
    """Of a launch, by the number of warps that is fastest with so many tokens."""
    found = []
    for num_warps in (4, 8, 16):
        made = binary(hidden, num_warps)
        path = sass.path(made.code, [])
        work = issue.Work.of(path, made.warps, 4 * hidden * DTYPE.itemsize, [True] * len(path))
        found.append(seconds_of([work], [0], tokens, made.resident, gpu))
    return machine.LAUNCH + min(found)
