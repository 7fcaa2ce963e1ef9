"""Kimi Delta Attention: a decay for each channel.

decay = exp(-exp(A_log) * softplus(f + dt_bias))                 or, with a lower bound,
decay = exp(lower_bound * sigmoid(exp(A_log) * (f + dt_bias)))
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as stock

from attnres_serve.model.linear_attention import delta_rule


class KimiGatedDeltaNetAttention(stock.KimiGatedDeltaNetAttention):
    """vLLM's layer with another core, configured like vLLM's."""

    def __init__(self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        # vLLM's norm is a Triton kernel, with an epsilon of 1e-5 for any checkpoint.
        self.o_norm = RMSNormGated(
            self.head_dim,
            eps=config.rms_norm_eps,
            norm_before_gate=True,
            activation="sigmoid",
        )

    def conv_weight(self) -> Tensor:
        weight: Tensor = self.conv1d.weight.squeeze(1)
        return weight

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        gate = g1[0].float() + self.dt_bias.view(-1, self.head_dim)
        rate = self.A_log.exp().unsqueeze(-1)
        if self.gate_lower_bound is None:
            log_decay = -rate * softplus(gate)
        else:
            log_decay = self.gate_lower_bound * torch.sigmoid(rate * gate)
        out = delta_rule.attend(
            mixed_qkv,
            log_decay.exp(),
            torch.sigmoid(beta[0].float()),
            self.head_dim,
            self.prefix,
        )
        core_attn_out.copy_(self.o_norm(out, g2))
