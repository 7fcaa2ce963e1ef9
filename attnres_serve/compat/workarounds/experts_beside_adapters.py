"""Experts without adapters, in a model whose other layers have some, on CPU.

vLLM 0.32: ``select_unquantized_moe_backend`` takes the Triton kernel with adapters wherever LoRA is
enabled, also where ``--lora-target-modules`` leaves the experts out, and a CPU has no Triton.
This can go with a vLLM that chooses by the layers that have adapters.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _as_without_adapters(original: Any) -> Any:
    """Let experts on CPU run by the kernel that they have without LoRA.

    Adapters of experts are refused before, see ``compat.rules``.
    """

    def select_unquantized_moe_backend(moe_config):
        moe_config.is_lora_enabled = False
        return original(moe_config)

    return select_unquantized_moe_backend


PATCH = Patch(
    targets=(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
        ":select_unquantized_moe_backend",
    ),
    make=_as_without_adapters,
    why="experts did not start on CPU with LoRA",
    models="AttnRes models on CPU with `--enable-lora`",
    first=(0, 28),
    report="lora-beside-experts",
)
