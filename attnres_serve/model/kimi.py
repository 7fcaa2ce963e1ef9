"""vLLM's Kimi Linear with the final norm at the end of the decoder, where the last site is.

vLLM's own decoder ends with ``hidden + residual`` and leaves the norm to ``compute_logits``, as its
draft heads read what is not normed.  Of the two variants that vLLM has, the one for ROCm runs on
any device; the other needs CUDA.
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
from attnres_serve.model.made_of import made_of
from attnres_serve.model.residual_decoder import ResidualDecoder

with without_init("vllm.models.kimi_k3"):  # which imports the variant for CUDA on a CPU too
    if not TYPE_CHECKING and device.is_cuda():
        from vllm.models.kimi_k3.nvidia import model as linear
    else:
        from vllm.models.kimi_k3.amd import linear


# Elsewhere vLLM's layers of Kimi Delta Attention are no operators of torch's.
@support_torch_compile(enable_if=lambda _: device.is_cpu())
class KimiLinearDecoder(ResidualDecoder, linear.KimiLinearModel):
    pass


def _set_eps(attention: nn.Module, eps: float) -> None:
    """Give norms within attention the epsilon that they have where the model was trained."""
    if hasattr(attention, "o_norm"):
        attention.o_norm.eps = eps  # of vLLM's layer for GPUs it is 1e-5 always
    if hasattr(attention, "rms_norm_eps"):
        attention.rms_norm_eps = latent.EPS  # of the variant for CUDA, which norms both latents


class KimiLinearForCausalLM(linear.KimiLinearForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any) -> None:
        parts: dict[str, Any] = {"KimiLinearModel": KimiLinearDecoder}
        if device.is_cpu():
            from attnres_serve.model import situ_experts

            # Its layer for Kimi K3 is made of kernels; the other one can do the same.
            parts["KimiK3DeltaAttention"] = linear.KimiLinearGatedDeltaNetAttention
            # Its runner of latent experts adds nothing on one worker, and warns of that.
            parts["ROCmLatentMoERunner"] = MoERunner
            situ_experts.replace()
            # On several workers vLLM pads narrow experts for kernels of GPUs, and fails at it here.
            vllm_config.model_config.hf_config.min_moe_intermediate_per_partition = 1
        with made_of(linear, **parts):
            super().__init__(vllm_config=vllm_config, **kwargs)
        for layer in islice(self.model.layers, self.model.start_layer, self.model.end_layer):
            _set_eps(layer.self_attn, self.config.rms_norm_eps)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
