"""docs/build/upstream/int8-in-float32-on-cpu.md"""

from unittest import mock

import torch


def fault() -> bool:
    """A kernel that has no activations in float32 is chosen for them."""
    halves = (torch.bfloat16, torch.float16)
    assert all(chosen(dtype) for dtype in halves), "a processor with AMX uses its kernel"
    return chosen(torch.float32)


def chosen(activations: torch.dtype) -> bool:
    """Whether the kernel for AMX is chosen for INT8 weights by a processor that has it."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    default = torch.get_default_dtype()
    torch.set_default_dtype(activations)
    try:
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True):
            return bool(cpu.check_cpu_sgl_kernel(64, 64, torch.int8))
    finally:
        torch.set_default_dtype(default)
