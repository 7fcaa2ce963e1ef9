"""vLLM's Kimi Linear with the final norm at the end of the decoder, where the last site is.

vLLM's decoder ends with ``hidden + residual`` and leaves the norm to ``compute_logits``, because
its draft heads read the sum before the norm.  vLLM has two variants: the one for ROCm runs on any
device; the other needs CUDA.
"""

from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from attnres_serve.compat import device
from attnres_serve.compat.bare_package import without_init
from attnres_serve.families import latent
from attnres_serve.model.residual_decoder import ResidualDecoder
from attnres_serve.model.swapped_classes import swapped_classes

with without_init("vllm.models.kimi_k3"):  # its __init__ imports the variant for CUDA even on a CPU
    if not TYPE_CHECKING and device.is_cuda():
        from vllm.models.kimi_k3.nvidia import model as linear
    else:
        from vllm.models.kimi_k3.amd import linear


# On other devices vLLM's layers of Kimi Delta Attention are no torch operators.
@support_torch_compile(enable_if=lambda _: device.is_cpu())
class KimiLinearDecoder(ResidualDecoder, linear.KimiLinearModel):
    pass


def _set_eps(attention: nn.Module, eps: float) -> None:
    """Give norms within attention the epsilon of the model's training code."""
    if hasattr(attention, "o_norm"):
        attention.o_norm.eps = eps  # vLLM's layer for GPUs always has 1e-5
    if hasattr(attention, "rms_norm_eps"):
        attention.rms_norm_eps = latent.EPS  # the variant for CUDA norms both latents


class KimiLinearForCausalLM(linear.KimiLinearForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any) -> None:
        parts: dict[str, Any] = {"KimiLinearModel": KimiLinearDecoder}
        if device.is_cpu():
            from attnres_serve.model import situ_experts

            # Its layer for Kimi K3 needs GPU kernels; the other one computes the same.
            parts["KimiK3DeltaAttention"] = linear.KimiLinearGatedDeltaNetAttention
            # Its runner of latent experts adds nothing on one worker, and logs a warning.
            parts["ROCmLatentMoERunner"] = MoERunner
            situ_experts.replace()
            # On several workers vLLM pads narrow experts for GPU kernels, which fails on CPU.
            vllm_config.model_config.hf_config.min_moe_intermediate_per_partition = 1
        with swapped_classes(linear, **parts):
            super().__init__(vllm_config=vllm_config, **kwargs)
        for layer in islice(self.model.layers, self.model.start_layer, self.model.end_layer):
            _set_eps(layer.self_attn, self.config.rms_norm_eps)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
