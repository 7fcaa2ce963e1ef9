"""INT8 weights in a model whose dtype is float32, on CPUs with AMX.

vLLM 0.32 chooses the kernel for AMX by the weights' dtype alone.  That kernel has activations in
bfloat16 or float16, so the start ends; oneDNN's kernel has them in float32, too.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _choosing_by_activations(original: Any) -> Any:
    """Choose oneDNN's kernel for activations in float32."""

    def check_cpu_sgl_kernel(n, k, dtype):
        import torch

        # While weights are loaded, the default is the model's dtype.
        return torch.get_default_dtype() != torch.float32 and original(n, k, dtype)

    return check_cpu_sgl_kernel


PATCH = Patch(
    targets=("vllm.model_executor.kernels.linear.scaled_mm.cpu:check_cpu_sgl_kernel",),
    make=_choosing_by_activations,
    why="INT8 weights ended the start in float32 where a CPU has AMX",
    models="AttnRes models on CPU with `--dtype float32`",
    first=(0, 28),
    report="int8-in-float32-on-cpu",
)
