"""Gated DeltaNet where vLLM's C++ cannot run: a decay for each head.

decay = exp(-exp(A_log) * softplus(a + dt_bias))
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

from attnres_serve.model.linear_attention import delta_rule

# The dtype and head sizes of vLLM's C++.
STOCK_DTYPE, STOCK_HEAD_DIMS = torch.bfloat16, {64, 128}


class QwenGatedDeltaNetAttention(stock.QwenGatedDeltaNetAttention):
    """vLLM's layer with another core for drafts, other dtypes and other head sizes."""

    def __init__(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str = "", **rest: Any
    ) -> None:
        super().__init__(config, vllm_config, prefix, **rest)
        dtype, sizes = vllm_config.model_config.dtype, {self.head_k_dim, self.head_v_dim}
        if dtype == STOCK_DTYPE and sizes <= STOCK_HEAD_DIMS and not self.num_spec:
            return
        self._forward_method = self._by_recurrence

    def conv_weight(self) -> Tensor:
        # Loading packs a bfloat16 weight for vLLM's convolution and keeps the plain one here.
        convolution: Any = getattr(self.conv1d, "base_layer", self.conv1d)  # LoRA wraps it
        weight: Tensor = getattr(convolution, "_cpu_unpacked_conv_weight", convolution.weight)
        return weight.flatten(1)

    def _by_recurrence(self, hidden_states: Tensor) -> Tensor:
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        mixed, z, b, a = self._parts(qkvz, ba)
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

    def _parts(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side, then what gates, writes and decays, by heads."""
        if self.gqa_interleaved_layout:
            *qkv, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            return torch.cat([x.flatten(1) for x in qkv], dim=-1), z, b, a
        values = self.value_dim // self.tp_size
        mixed, z = qkvz.split([qkvz.shape[-1] - values, values], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return mixed, z.unflatten(-1, (-1, self.head_v_dim)), b, a
