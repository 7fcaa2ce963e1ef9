"""vLLM's Llama with a gate on the output of attention, before the output projection.

    y = o_proj(attention(x) * sigmoid(attn_gate(x)))

``attn_gate`` is a linear map from the normed input to one value per channel of every head (the
elementwise, head-specific form of arXiv 2505.06708).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)


class GatedLlamaAttention(LlamaAttention):
    """Llama's attention; a tensor-parallel rank holds the gates of its heads."""

    def __init__(
        self,
        *,
        hidden_size: int,
        bias: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
        **rest: Any,
    ) -> None:
        super().__init__(
            hidden_size=hidden_size, bias=bias, quant_config=quant_config, prefix=prefix, **rest
        )
        # Not called gate_proj: vLLM's Llama would stack a weight of that name with up_proj.
        self.attn_gate = ColumnParallelLinear(
            hidden_size,
            self.total_num_heads * self.head_dim,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.attn_gate",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        gate, _ = self.attn_gate(hidden_states)
        output, _ = self.o_proj(self.attn(q, k, v) * torch.sigmoid(gate))
        return output


class GatedLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(
        self, vllm_config: VllmConfig, prefix: str = "", config: LlamaConfig | None = None
    ) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=GatedLlamaAttention)


class GatedLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=GatedLlamaDecoderLayer)
