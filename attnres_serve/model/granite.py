"""vLLM's Granite, dense and with experts, whose layers hand on a residual as its other decoders do.

vLLM's layers add ``residual + output * residual_multiplier`` and pass a norm only its input, which
leaves no place for a site.  Here the multiplier belongs to the output of a sublayer, and the norm
adds.
"""

from typing import Any

from torch import Tensor
from vllm.model_executor.models import granite, granitemoe

from attnres_serve.model.residual_decoder import ResidualDecoder
from attnres_serve.model.swapped_classes import swapped_classes


class _Layer:
    """The order of a layer; the names of its second sublayer differ."""

    second: str

    def forward(
        self: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states = hidden_states * self.residual_multiplier
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = getattr(self, self.second)(hidden_states)
        return hidden_states * self.residual_multiplier, residual


class _Decoder(ResidualDecoder):
    def embed(self: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        return super().embed(input_ids, inputs_embeds) * self.config.embedding_multiplier


class GraniteLayer(_Layer, granite.GraniteDecoderLayer):
    second = "mlp"


class GraniteDecoder(_Decoder, granite.GraniteModel):
    pass


class GraniteMoeLayer(_Layer, granitemoe.GraniteMoeDecoderLayer):
    second = "block_sparse_moe"


class GraniteMoeDecoder(_Decoder, granitemoe.GraniteMoeModel):
    pass


class GraniteForCausalLM(granite.GraniteForCausalLM):
    def __init__(self, **kwargs: Any) -> None:
        with swapped_classes(
            granite, GraniteModel=GraniteDecoder, GraniteDecoderLayer=GraniteLayer
        ):
            super().__init__(**kwargs)


class GraniteMoeForCausalLM(granitemoe.GraniteMoeForCausalLM):
    def __init__(self, **kwargs: Any) -> None:
        with swapped_classes(
            granitemoe, GraniteMoeModel=GraniteMoeDecoder, GraniteMoeDecoderLayer=GraniteMoeLayer
        ):
            super().__init__(**kwargs)
