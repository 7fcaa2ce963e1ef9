"""INT8 weights in a model whose dtype is float32, on CPUs with AMX."""

import pytest
import torch

from attnres_serve.compat.workarounds import int8_in_float32

pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear.scaled_mm import cpu

from tests.compat.faults.int8_in_float32 import chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_amx_has_activations_of_two_bytes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", cpu.check_cpu_sgl_kernel)
    int8_in_float32.PATCH.apply()
    assert chosen(dtype) == (dtype != torch.float32)
