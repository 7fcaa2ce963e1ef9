"""Lightning attention of Ring-linear: a constant decay for each head, and no delta rule.

vLLM's kernel decays the state of earlier blocks of 256 tokens and of earlier chunks by one token
too few.  Here prefill and decode compute the same for a prompt of any length.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.linear import bailing_linear_attn as stock

from attnres_serve.errors import SettingError
from attnres_serve.kernels.recurrence import recurrence
from attnres_serve.model.linear_attention import batch


class BailingMoELinearAttention(stock.BailingMoELinearAttention):
    """vLLM's layer with a core that runs without Triton.

    A head's state in the cache is ``[d, d]``: keys by values in vLLM's kernels, values by keys in
    this layer.  Nothing else reads it.
    """

    def __init__(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str = "linear_attn"
    ) -> None:
        super().__init__(config, vllm_config, prefix)
        # Also for models without sites, which no rule checks.
        if vllm_config.num_speculative_tokens:
            raise SettingError(
                "speculative decoding is not supported on CPU with lightning attention, whose "
                "state cannot go back; start without --speculative-config."
            )

    def _forward(self, hidden_states: Tensor, output: Tensor, positions: Tensor) -> None:
        sequences = batch.current(self.prefix)
        if sequences is None:
            output.zero_()
            return
        qkv, _ = self.query_key_value(hidden_states)
        qkv = silu(qkv.float()) if self.linear_silu else qkv.float()
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        if self.use_qk_norm:
            q, k = self._normed(q, self.query_layernorm), self._normed(k, self.key_layernorm)
        if self.linear_rope:
            q, k = self.rotary_emb(positions, q.flatten(1), k.flatten(1))
            q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        decay = torch.exp(-self.tp_slope.float()).view(1, -1, 1)
        (state,) = self.kv_cache
        mixed = recurrence(q, k, v, decay, None, state, *sequences, self.scaling).flatten(1)
        groups = mixed.unflatten(-1, (-1, self.g_norm.group_size))
        mixed = rms_norm(groups, groups.shape[-1:], eps=self.rms_norm_eps).flatten(1)
        gate, _ = self.g_proj(hidden_states)
        mixed = mixed * self.g_norm.weight.float() * torch.sigmoid(gate.float())
        output[:], _ = self.dense(mixed.to(hidden_states.dtype))

    def _normed(self, x: Tensor, norm: torch.nn.Module) -> Tensor:
        return rms_norm(x, x.shape[-1:], norm.weight.float(), self.rms_norm_eps)
