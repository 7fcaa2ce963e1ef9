"""A decoder of vLLM's layers whose every layer has a recurrence of the delta rule and a gated MLP.

vLLM has the recurrences, within models that have layers of attention too.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsPP
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from attnres_serve.model.residual_decoder import ResidualDecoder


class DeltaNetLayer(nn.Module):
    """A recurrence and an MLP, each behind its norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = self.recurrence(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def recurrence(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str
    ) -> nn.Module:
        """vLLM's layer of it."""
        raise NotImplementedError

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """The recurrence's output ``[tokens, hidden]``."""
        mixed: Tensor = self.self_attn(hidden_states=hidden_states)
        return mixed

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.mix(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DeltaNetDecoder(ResidualDecoder, nn.Module):
    """What every such decoder is but for its layers, whose class is stated."""

    layer: ClassVar[type[DeltaNetLayer]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: self.layer(vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)


class DeltaNetForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsPP):
    """The head, and the names of tensors by which vLLM's layers fuse them."""

    decoder: ClassVar[type[DeltaNetDecoder]]
    packed_modules_mapping: ClassVar[dict[str, list[str]]]
    hf_to_vllm_mapper: ClassVar[WeightsMapper]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.model = self.decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor | IntermediateTensors:
        found: Tensor | IntermediateTensors
        found = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return found

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        found: set[str] = loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return found


def stacked(fused: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, int]]:
    """The table of vLLM's mapper for projections of a layer that are rows of one.

    Args:
        fused: the parts of a projection in their order, by its name.
    """
    return {
        f".{part}.": (f".{whole}.", place)
        for whole, parts in fused.items()
        for place, part in enumerate(parts)
    }


def load_by_place(convolution: nn.Module, rows: tuple[int, ...], rank: int) -> None:
    """Let the weight of a convolution take one of its parts at a time, as vLLM's mapper names it.

    Args:
        convolution: with a weight ``[channels, 1, W]`` of this worker's channels.
        rows: channels of the parts on each worker.
        rank: of this worker.
    """

    def load(whole: Tensor, part: Any) -> None:
        place = part.shard_id
        begin, size = sum(rows[:place]), rows[place]
        whole.data[begin : begin + size].copy_(part[rank * size : (rank + 1) * size])

    weight = convolution.weight
    if hasattr(weight, "weight_loader"):
        del weight.weight_loader
    weight.weight_loader = load
