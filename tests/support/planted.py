"""Faults that are planted into what serves, to see that a comparison finds them."""

from torch import Tensor

from attnres_serve.model.normed_attention import NormedLlamaAttention


def keys_normed_before_they_are_rotated() -> None:
    """As Qwen3's are."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    NormedLlamaAttention.forward = forward
