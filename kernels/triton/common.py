"""What the Triton kernels share: constants, and the contracts that are checked before a launch."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HIDDEN = 16384

Value = TypeVar("Value")


class Config(NamedTuple):
    """How a program is compiled: source rows loaded together, and warps."""

    tile: int
    num_warps: int


# Largest padded hidden size -> config; constants, because serving must not tune while it runs.
# Chosen from compile_ahead, and for up to 512 tokens held against others on an H100
# (docs/measure/gpu.md; at 4096 and 512 tokens a tile of one row and 4 warps was 5 % faster): one
# 128-bit load of bf16 per thread and row (padded size >= 256 * warps), no spills up to 8192 in any
# dtype on sm_80, 90 and 100, and as many programs per SM as keep about 25 KB of loads in flight
# (HBM latency x bandwidth / SMs).  At 7168 on sm_90 a second row in flight takes over 200
# registers and leaves one program per SM; a single row takes 128 and leaves two (on sm_80 and
# sm_100 one).  At 16384 the half types spill up to 16 bytes and fp32 up to 80; larger are refused.
# A merge that reads rows besides the answer takes some registers more: at 7168 on sm_90 one program
# is left, and at 16384 fp32 spills up to 184 bytes.
# One config for all T, except in ``single_pass`` and ``phase_1``: what a token gets does not
# depend on its batch.
CONFIGS = {
    256: Config(tile=2, num_warps=1),
    512: Config(tile=2, num_warps=2),
    1024: Config(tile=2, num_warps=2),
    2048: Config(tile=2, num_warps=4),
    4096: Config(tile=2, num_warps=8),
    8192: Config(tile=1, num_warps=8),
    MAX_HIDDEN: Config(tile=1, num_warps=16),
}


def config_for(hidden_size: int) -> Config:
    """The config of a hidden size, at most ``MAX_HIDDEN``."""
    return entry(CONFIGS, hidden_size)


def entry(table: Mapping[int, Value], size: int) -> Value:
    """The value for a size in a table by the largest size, of channels or of sites."""
    return table[min(limit for limit in table if size <= limit)]


def launch_options(early: bool) -> dict[str, Any]:
    """What every launch passes to its kernel besides the kernel's arguments.

    Args:
        early: programmatic dependent launch.  The grid is set up while the kernel ahead of it on
            the stream drains, and every program of ours then blocks in ``gdc_wait``
            (``griddepcontrol.wait``) until that kernel, which itself waited for those ahead of it,
            has completed and what it wrote is visible.  The wait stands before the first access to
            memory, so a launch that starts early reads, overwrites and returns what it otherwise
            would.
            Queries and weights are no exception: a caller may have folded a query in the kernel
            just ahead.  Our kernels do not release their followers early
            (``gdc_launch_dependents``), because a follower need not be ours and wait.
    """
    options: dict[str, Any] = {"EARLY": early}
    options["enable_fp_fusion"] = True  # the default of Triton up to 3.9 and not of 3.10
    return options | {"launch_pdl": True} if early else options


def starts_early(device: torch.device) -> bool:
    """Whether launches on a device start early: sm_90 and later."""
    return (capability(device) or (0, 0)) >= (9, 0)


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None of others, and in the interpreter."""
    if INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return None
    result: tuple[int, int] = torch.cuda.get_device_capability(device)
    return result


_each_token_alone = False


def take_each_token_alone(alone: bool) -> None:
    """Let what a token gets depend on no other, in this process; or take that back."""
    global _each_token_alone
    _each_token_alone = alone


def takes_each_token_alone() -> bool:
    """Whether there is no launch whose sums have another order by the number of tokens."""
    return _each_token_alone


_compiled: set[tuple[object, ...]] = set()


def compile_once(kernel: Any, kind: tuple[object, ...], arguments: Callable[[], Any]) -> None:
    """Compile a launch by one for no tokens, unless that was done for one of its kind.

    Else it might be compiled during a request: the first launches of a server are of many tokens,
    and those of few have another config or kernel.

    Args:
        kernel: as Triton has it.
        kind: what tells the binaries apart that a model needs, the kernel included.
        arguments: gives those of the launch.
    """
    if kind not in _compiled:
        kernel[(0,)](**arguments())
        _compiled.add(kind)


def check_site(
    delta: Tensor,
    bank: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    row: int,
    **read: Tensor,
) -> None:
    """Raise on the first contract that the arguments of a site break.

    Of ``read``, what it reads besides, only the memory is checked.
    """
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
    check_activations("delta", delta)
    if bank.dtype != delta.dtype:
        raise TypeError(f"bank is {bank.dtype} but delta is {delta.dtype}")
    check_query("query", query, hidden)
    check_activations("norm_weight", norm_weight)
    if norm_weight.shape != (hidden,):
        raise ValueError(f"norm_weight is {list(norm_weight.shape)}, not [{hidden}]")
    tensors = {"delta": delta, "query": query, "norm_weight": norm_weight, "bank": bank, **read}
    check_memory(tensors)
    if _overlaps_itself(bank):
        raise ValueError("bank is written and its rows overlap in memory")


def check_bias(delta: Tensor, bias: Tensor | None, rows: int, *sites: int) -> None:
    """Raise unless biases have a number for every row that is read, and may be used with delta."""
    if bias is None:
        return
    if bias.dtype != torch.float32 or bias.shape[:-1] != sites or bias.shape[-1] < rows:
        shape = [*sites, rows]
        raise ValueError(f"bias is {list(bias.shape)} {bias.dtype}, not {shape} torch.float32")
    check_memory({"delta": delta, "bias": bias})


def check_activations(name: str, tensor: Tensor) -> None:
    """Refuse a dtype that the kernels do not read."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, not float32, float16 or bfloat16")


def check_query(name: str, query: Tensor, *shape: int) -> None:
    """Refuse pseudo-queries of another shape or dtype."""
    if query.dtype != torch.float32:
        raise TypeError(f"{name} is {query.dtype}; it is folded with the key norm in float32")
    if query.shape != shape:
        raise ValueError(f"{name} is {list(query.shape)}, not {list(shape)}")


def check_like(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse any other shape or dtype."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype}, not {list(shape)} {dtype}"
        )


def check_memory(tensors: dict[str, Tensor]) -> None:
    """Raise unless a launch may use these tensors together.

    One device, which runs Triton; unit stride on the last dimension of all but single elements.

    Args:
        tensors: the tensors by name.
    """
    first, like = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != like.device:
            raise ValueError(f"{name} is on {tensor.device} but {first} on {like.device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have unit stride on the hidden dimension")
    if like.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "Triton has no CPU backend: use the torch path, or set TRITON_INTERPRET=1 before "
            "Triton is imported"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two index tuples of a strided view may name the same element."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
