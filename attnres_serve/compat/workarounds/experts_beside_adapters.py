"""Experts without adapters on CPU, in a model with adapters for other layers.

vLLM 0.32: ``select_unquantized_moe_backend`` chooses the Triton kernel with adapters whenever LoRA
is enabled, even if ``--lora-target-modules`` excludes the experts. A CPU has no Triton.
Remove this with a vLLM that chooses by the layers with adapters.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _as_without_adapters(original: Any) -> Any:
    """Choose the kernel without LoRA for experts on CPU.

    Adapters of experts are refused earlier, see ``compat.rules``.
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
