"""Stands for ``modeling_qwen3_attnres.py``: delta-attnres' class in the mode ``block``, for Qwen3.

It is copied under that name to where Python finds it.  The layers are transformers' own.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class Qwen3AttnResConfig(Qwen3Config):
    model_type = "qwen3_attnres"


class Qwen3AttnResForCausalLM(Qwen3ForCausalLM):
    config_class = Qwen3AttnResConfig

    def __init__(self, config: Qwen3AttnResConfig) -> None:
        super().__init__(config)
        for owner, name in (*self._owners(), (self.model, "final")):
            owner.add_module(f"{name}_res_proj", nn.Linear(config.hidden_size, 1, bias=False))
            norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            owner.add_module(f"{name}_res_norm", norm)

    def _owners(self) -> list[tuple[nn.Module, str]]:
        return [(layer, name) for layer in self.model.layers for name in ("attn", "mlp")]

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        """One sequence from its beginning, without a cache."""
        partial: Tensor | None = self.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.model.rotary_emb(partial, position_ids=positions)
        mask = create_causal_mask(self.config, partial, None, None, positions)
        size = 2 * -(-len(self.model.layers) // self.config.attnres_num_blocks)
        blocks: list[Tensor] = []
        for index, (layer, name) in enumerate(self._owners()):
            norm = layer.post_attention_layernorm if index % 2 else layer.input_layernorm
            mixed = norm(mix(layer, name, [*blocks, partial]))
            if index % size == 0:
                blocks, partial = [*blocks, partial], None
            output = layer.mlp(mixed) if index % 2 else layer.self_attn(mixed, rotary, mask)[0]
            partial = output if partial is None else partial + output
        hidden = self.model.norm(mix(self.model, "final", [*blocks, partial]))
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


def mix(owner: nn.Module, name: str, sources: list[Tensor]) -> Tensor:
    values = torch.stack(sources)
    scores = getattr(owner, f"{name}_res_proj")(getattr(owner, f"{name}_res_norm")(values))
    return (scores.softmax(0) * values).sum(0)
