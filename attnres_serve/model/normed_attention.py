"""vLLM's Llama with a norm of each head's queries before the rotary embedding, and of its keys
after it.  Embeddings may be multiplied by the square root of the hidden size.
"""

from typing import Any

from torch import Tensor
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)

from attnres_serve.families.normed_llama import DEFAULTS, NORMS, SCALE


class NormedLlamaAttention(LlamaAttention):
    """Llama's attention with norms of the head size; every tensor-parallel rank holds both."""

    def __init__(self, *, config: LlamaConfig, **rest: Any) -> None:
        super().__init__(config=config, **rest)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if getattr(config, NORMS, DEFAULTS[NORMS]):
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, self._normed(q, self.q_norm), k)
        output, _ = self.o_proj(self.attn(q, self._normed(k, self.k_norm), v))
        return output

    def _normed(self, heads: Tensor, norm: RMSNorm | None) -> Tensor:
        """Heads side by side, ``[tokens, heads * head_dim]``, each normed."""
        if norm is None:
            return heads
        return norm(heads.unflatten(-1, (-1, self.head_dim))).flatten(-2)


class NormedLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(
        self, vllm_config: VllmConfig, prefix: str = "", config: LlamaConfig | None = None
    ) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=NormedLlamaAttention)


class NormedLlamaModel(LlamaModel):
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        rows: Tensor = super().embed_input_ids(input_ids)
        if getattr(self.config, SCALE, DEFAULTS[SCALE]):
            return rows * self.config.hidden_size**0.5
        return rows


class NormedLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=NormedLlamaDecoderLayer)

    def _init_model(self, **arguments: Any) -> LlamaModel:
        return NormedLlamaModel(**arguments)
