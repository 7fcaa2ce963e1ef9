"""What the model takes an SM of Hopper to be; each figure with its source.

Latencies in cycles are those measured by Luo et al., "Benchmarking and dissecting the NVIDIA Hopper
GPU architecture via microbenchmarking" (arXiv 2402.13499, table 4), where they have one.  Rates are
those of NVIDIA's CUDA C++ programming guide, arithmetic instructions, compute capability 9.0.  What
is marked as assumed has no source but older GPUs.
"""

from typing import NamedTuple

from benchmarks.kernels.model.sass import Instruction


class Gpu(NamedTuple):
    """What differs between GPUs of one architecture."""

    sms: int
    idle_clock: float  # cycles per second where no SM has more than one program: the highest clock
    clock: float  # cycles per second under load
    memory: float  # bytes per second that a copy reaches, read and written together


# The highest clock is NVIDIA's; that under load is assumed.  A copy reaches about nine tenths of
# the peak bandwidths of 3.35 and 4.8 TB/s.
GPUS = {
    "H100": Gpu(132, 1.98e9, 1.755e9, 3.0e12),
    "H200": Gpu(132, 1.98e9, 1.755e9, 4.3e12),
}
# Of a launch in a graph, besides its cycles: the median of the anchors at T = 1 (anchors.py).
LAUNCH = 0.7e-6  # seconds
SCHEDULERS = 4
L2_BYTES = 64.0  # a cycle, from L2 to one SM (assumed, as on A100)

HBM_LATENCY, L2_LATENCY, L1_LATENCY = 479, 263, 41
RESULT = {  # cycles until the scoreboard of a result is released
    "SHFL": 24,  # assumed
    "LDS": 29,
    "LDSM": 33,
    "MUFU": 22,  # assumed
    "S2R": 25,  # assumed
    "S2UR": 25,  # assumed
    "R2UR": 12,  # assumed
    "LDC": 30,  # assumed
    "HMMA": 33,
}
OTHER_RESULT = 14  # assumed
OPERANDS_READ = 8  # cycles until a store or a load has read its registers (assumed)
BARRIER = 22  # cycles from the last warp's arrival (assumed)
NEXT_PROGRAM = 200  # cycles from a program's end to the first instruction of the next (assumed)

# Pipes of one scheduler, and one that all four share.
FMA, ALU, MUFU, UNIFORM, TENSOR, LSU = range(6)
FMA_PIPE = {"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"}
SHARED_MEMORY = {"LDS", "STS", "LDSM", "STSM"}
COPY = "LDGSTS"  # from global to shared memory, past the registers
GLOBAL_MEMORY = {"LDG", "STG", COPY}


def pipe(one: Instruction) -> tuple[int, int]:
    """The pipe that an instruction takes, and for how many cycles one warp holds it."""
    name = one.opcode
    if name in FMA_PIPE:
        return FMA, 1  # 128 results a cycle and SM
    if name == "MUFU":
        return MUFU, 8  # 16
    if name == "HMMA":
        return TENSOR, 8  # m16n8k16 at the rate of sm_80's instruction: half of WGMMA's
    if name == "SHFL":
        return LSU, 1  # 32
    if name in SHARED_MEMORY | GLOBAL_MEMORY:
        return LSU, max(1, 32 * one.bytes // 128)  # 128 bytes
    if name.startswith("U") or name in ("S2R", "S2UR", "R2UR", "LDC", "BAR", "BRA", "EXIT"):
        return UNIFORM, 2  # assumed
    return ALU, 2  # 64: integers, comparisons, selections, conversions
