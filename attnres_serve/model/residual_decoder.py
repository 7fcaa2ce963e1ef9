"""A decoder's forward pass with a residual between layers and a norm at the end, the last site."""

from itertools import islice
from typing import Any

from torch import Tensor
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors


class ResidualDecoder:
    """It has the arguments of vLLM's decoders, which torch.compile depends on."""

    def embed(self: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The input of the first layer."""
        return self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds

    def forward(
        self: Any,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        residual = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        else:
            hidden_states = self.embed(input_ids, inputs_embeds)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            # A variant of Kimi Linear returns another sum between the two.
            hidden_states, *_, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states
