"""vLLM's linear-attention layers on CPU, through vLLM's hook for external layers.

vLLM implements them as Triton kernels, and Gated DeltaNet in C++ for bfloat16 and two head sizes.
Here ``kernels.recurrence`` computes them.  Parameters, their names, their tensor-parallel shards
and the cache are those of vLLM's layers.
"""

import importlib
import sys

from attnres_serve.compat import device, host
from attnres_serve.kernels.cpp import backend as cpp

LAYERS = "vllm.model_executor.layers.mamba"
# vLLM's modules and classes, and the modules here with a class of the same name.
REPLACED = (
    ("gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention", "kda"),
    ("gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention", "gdn"),
    ("linear.bailing_linear_attn", "BailingMoELinearAttention", "lightning"),
)


def replace_for_cpu() -> None:
    """On CPU, let vLLM build the layers of this package instead of vLLM's (idempotent).

    Call it after the model's class is imported and before it is built.  Layers that are not
    imported by then are not replaced: importing them imports Triton, which other models do not
    need.
    """
    if not device.is_cpu():
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    for module, name, replacement in REPLACED:
        if f"{LAYERS}.{module}" in sys.modules and name not in op_registry_oot:
            layer = getattr(importlib.import_module(f"{__name__}.{replacement}"), name)
            PluggableLayer.register_oot(layer, name=name)
            if (problem := cpp.problem()) is not None:
                host.logger().warning("%s runs in plain torch, which is slow: %s", name, problem)
