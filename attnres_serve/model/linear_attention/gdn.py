"""Gated DeltaNet, where vLLM's C++ cannot run it: a decay for each head.

decay = exp(-exp(A_log) * softplus(a + dt_bias))
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

from attnres_serve.model.linear_attention import batch, delta_rule

# What vLLM's C++ has loops for.
STOCK_DTYPE, STOCK_HEAD_DIMS = torch.bfloat16, {64, 128}


class QwenGatedDeltaNetAttention(stock.QwenGatedDeltaNetAttention):
    """vLLM's layer, with another core for other dtypes than bfloat16 and other head sizes."""

    def __init__(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str = "", **rest: Any
    ) -> None:
        super().__init__(config, vllm_config, prefix, **rest)
        dtype, sizes = vllm_config.model_config.dtype, {self.head_k_dim, self.head_v_dim}
        if dtype == STOCK_DTYPE and sizes <= STOCK_HEAD_DIMS:
            return
        if not self.gqa_interleaved_layout:  # of later models, none of which is served here
            return
        batch.refuse_speculation(self.num_spec)
        self._forward_method = self._by_recurrence

    def conv_weight(self) -> Tensor:
        # Loading packs a bfloat16 weight for vLLM's own convolution and leaves it here as it was.
        convolution: Any = getattr(self.conv1d, "base_layer", self.conv1d)  # LoRA wraps it
        weight: Tensor = getattr(convolution, "_cpu_unpacked_conv_weight", convolution.weight)
        return weight.flatten(1)

    def _by_recurrence(self, hidden_states: Tensor) -> Tensor:
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        *qkv, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        mixed = torch.cat([x.flatten(1) for x in qkv], dim=-1)
        decay = torch.exp(-self.A_log.exp() * softplus(a.float() + self.dt_bias.float()))
        out = delta_rule.attend(
            mixed,
            decay.unsqueeze(-1),
            torch.sigmoid(b.float()),
            self.head_v_dim,
            self.prefix,
        )
        projected: Tensor = self._output_projection(out, z)
        return projected
