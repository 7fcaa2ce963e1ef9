"""The model of ``benchmarks.peers``: a Llama with Attention Residuals as a Hugging Face class.

The layers are transformers' own, the sites plain PyTorch in one of two styles: ``open_attnres``, in
the activation dtype with the prenorm apart, as open-attnres and delta-attnres write them; ``fla``,
in float32 with the prenorm before rounding, as the reference in flash-linear-attention does (its
model class itself needs Triton and Flash Attention).  The function is the same in both and in the
house format, whose names these are: blocks of equal size and a final mix, no recency bias.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm


def open_attnres(values: Tensor, query: Tensor, key_norm: nn.Module, norm: nn.Module) -> Tensor:
    """One site, from stacked sources ``[n, batch, tokens, d]`` to ``[batch, tokens, d]``."""
    weights = torch.einsum("d,nbtd->nbt", query, key_norm(values)).softmax(0)
    return norm(torch.einsum("nbt,nbtd->btd", weights, values))


def fla(values: Tensor, query: Tensor, key_norm: nn.Module, norm: nn.Module) -> Tensor:
    """As ``open_attnres``, in float32."""
    exact = values.float()
    keys = rms_norm(exact, query.shape, key_norm.weight.float(), key_norm.variance_epsilon)
    weights = torch.einsum("d,nbtd->nbt", query.float(), keys).softmax(0)
    mixed = torch.einsum("nbt,nbtd->btd", weights, exact)
    return rms_norm(mixed, query.shape, norm.weight.float(), norm.variance_epsilon).to(values.dtype)


STYLES = {"open_attnres": open_attnres, "fla": fla}


class AttnResLlamaConfig(LlamaConfig):
    model_type = "attnres_llama"


class AttnResLlamaModel(LlamaModel):
    """The decoder; ``site`` is one of ``STYLES``."""

    site = staticmethod(open_attnres)

    def __init__(self, config: AttnResLlamaConfig) -> None:
        super().__init__(config)
        owners = [(layer, name) for layer in self.layers for name in ("self_attention", "mlp")]
        for owner, name in (*owners, (self, "output_attn")):
            owner.add_module(f"{name}_res_proj", nn.Linear(config.hidden_size, 1, bias=False))
            norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            owner.add_module(f"{name}_res_norm", norm)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states; ``generate`` gives all of these arguments."""
        partial: Tensor | None = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(partial, position_ids=position_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=partial,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        blocks: list[Tensor] = []
        for index in range(2 * len(self.layers)):
            layer = self.layers[index // 2]
            name = "mlp" if index % 2 else "self_attention"
            norm = layer.post_attention_layernorm if index % 2 else layer.input_layernorm
            mixed = self.mix(layer, name, [*blocks, partial], norm)
            if index % self.config.attn_res["block_size"] == 0:
                blocks, partial = [*blocks, partial], None
            if index % 2:
                output = layer.mlp(mixed)
            else:
                output, _ = layer.self_attn(mixed, rotary, mask, past_key_values)
            partial = output if partial is None else partial + output
        hidden = self.mix(self, "output_attn", [*blocks, partial], self.norm)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def mix(self, owner: nn.Module, name: str, sources: list[Tensor], norm: nn.Module) -> Tensor:
        """The normed mix of the sources; of one source its norm."""
        if len(sources) == 1:
            return norm(sources[0])
        query = getattr(owner, f"{name}_res_proj").weight[0]
        return self.site(torch.stack(sources), query, getattr(owner, f"{name}_res_norm"), norm)


class AttnResLlamaForCausalLM(LlamaForCausalLM):
    config_class = AttnResLlamaConfig

    def __init__(self, config: AttnResLlamaConfig) -> None:
        super().__init__(config)
        self.model = AttnResLlamaModel(config)


def write_checkpoints(folder: Path, shape: dict[str, Any]) -> None:
    """Write ``folder/attnres`` (house format) and ``folder/standard`` (a Llama), both bfloat16.

    ``shape`` are keys of config.json.  The weights but the queries and key norms are shared:
    N(0, 1/fan-in), queries among them, norms near 1, embeddings N(0, 1).  So none is zero or
    denormal, which would distort times, and the weights of a site differ.
    """
    model = AttnResLlamaForCausalLM(AttnResLlamaConfig(**shape)).bfloat16()
    draw = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.data.copy_(1 + 0.1 * noise if weight.dim() == 1 else scale * noise)
    model.save_pretrained(folder / "attnres")
    plain = {key: value for key, value in shape.items() if key != "attn_res"}
    standard = LlamaForCausalLM(LlamaConfig(**plain)).bfloat16()
    standard.load_state_dict(model.state_dict(), strict=False)
    standard.save_pretrained(folder / "standard")
