"""Experts without adapters, in a model whose other layers have some, on CPU.

vLLM 0.32: ``select_unquantized_moe_backend`` takes the Triton kernel with adapters wherever LoRA is
enabled, also where ``--lora-target-modules`` leaves the experts out, and a CPU has no Triton.
This can go with a vLLM that chooses by the layers that have adapters.
"""

from typing import Any


def use_usual_kernel() -> None:
    """Let experts on CPU run by the kernel that they have without LoRA (idempotent).

    Adapters of experts are refused before, see ``compat.adapters``.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    own: Any = getattr(module, "select_unquantized_moe_backend", None)
    if own is None or getattr(own, "knows_no_adapters", False):  # none in some other vLLMs
        return

    def select_unquantized_moe_backend(moe_config):
        moe_config.is_lora_enabled = False
        return own(moe_config)

    select_unquantized_moe_backend.knows_no_adapters = True  # type: ignore[attr-defined]
    module.select_unquantized_moe_backend = select_unquantized_moe_backend
