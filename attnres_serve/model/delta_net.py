"""vLLM's Llama with a delta-rule recurrence instead of attention in every layer.

vLLM has the recurrences only within models that have attention layers too.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.utils import WeightsMapper


class DeltaNetLayer(nn.Module):
    """A recurrence and an MLP, each after its norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
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
        """vLLM's layer of the recurrence."""
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


class DeltaNetForCausalLM(LlamaForCausalLM, HasInnerState, IsAttentionFree):
    """A model of such layers; subclasses state the layer's class and the fused tensors' names."""

    layer: ClassVar[type[DeltaNetLayer]]
    packed_modules_mapping: ClassVar[dict[str, list[str]]]
    hf_to_vllm_mapper: ClassVar[WeightsMapper]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=self.layer)
        self.model.hf_to_vllm_mapper = self.hf_to_vllm_mapper


def stacked(fused: Mapping[str, tuple[str, ...]], within: str = "") -> dict[str, tuple[str, int]]:
    """The table for vLLM's mapper of projections that vLLM fuses by rows.

    Args:
        fused: the parts of a fused projection in their order, by its name.
        within: a dot and the name of the module that holds them; empty for any module.
    """
    return {
        f"{within}.{part}.": (f"{within}.{whole}.", place)
        for whole, parts in fused.items()
        for place, part in enumerate(parts)
    }


def by_place(load: Callable[[Tensor, Tensor, int], None]) -> Callable[[Tensor, Any], None]:
    """A loader of one part of a fused weight, with the signature that vLLM's mapper calls."""
    return lambda whole, part: load(whole, part, part.shard_id)
