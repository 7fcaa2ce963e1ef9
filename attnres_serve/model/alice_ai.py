"""AliceAI with standard residuals: vLLM's Qwen3-Next, whose linear layers are Kimi Delta Attention
and whose experts are chosen by a sigmoid and a bias, and weighted by the sigmoid alone.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.models import qwen3_next, qwen3_next_mtp
from vllm.model_executor.models.utils import WeightsMapper

from attnres_serve.model import delta_net, kda
from attnres_serve.model.swapped_classes import swapped_classes

FUSED = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
STACKED = delta_net.stacked(FUSED, ".linear_attn")


def linear_layer(
    config: PretrainedConfig, vllm_config: VllmConfig, prefix: str, **_: Any
) -> nn.Module:
    """vLLM's layer of Kimi Delta Attention, configured by the keys of Qwen3-Next."""
    return kda.attention(config, vllm_config, prefix)


def experts(*, gate: nn.Module, num_experts: int, **rest: Any) -> nn.Module:
    """vLLM's experts, all in one group: without groups its CPU has softmax alone."""
    bias = torch.empty(num_experts, dtype=torch.float32)
    gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
    return FusedMoEFactory(
        gate=gate,
        num_experts=num_experts,
        scoring_func="sigmoid",
        e_score_correction_bias=gate.e_score_correction_bias,
        use_grouped_topk=True,
        num_expert_group=1,
        topk_group=1,
        **rest,
    )


class AliceAILayer(qwen3_next.Qwen3NextDecoderLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with swapped_classes(
            qwen3_next, QwenGatedDeltaNetAttention=linear_layer, FusedMoEFactory=experts
        ):
            super().__init__(*args, **kwargs)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        mixer = self.linear_attn if self.layer_type == "linear_attention" else self.self_attn
        hidden_states = mixer(hidden_states=hidden_states, positions=positions)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class AliceAIDecoder(qwen3_next.Qwen3NextModel):
    hf_to_vllm_mapper = (
        WeightsMapper(orig_to_new_stacked=STACKED) | qwen3_next.Qwen3NextModel.hf_to_vllm_mapper
    )


class AliceAIForCausalLM(kda.KDAStates, qwen3_next.Qwen3NextForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **qwen3_next.Qwen3NextForCausalLM.packed_modules_mapping,
        **{whole: list(parts) for whole, parts in FUSED.items()},
    }

    def __init__(self, **kwargs: Any) -> None:
        with swapped_classes(
            qwen3_next, Qwen3NextModel=AliceAIDecoder, Qwen3NextDecoderLayer=AliceAILayer
        ):
            super().__init__(**kwargs)


class AliceAIMTP(qwen3_next_mtp.Qwen3NextMTP):
    """The draft head: a layer of full attention with standard residuals."""

    def __init__(self, **kwargs: Any) -> None:
        with swapped_classes(qwen3_next_mtp, Qwen3NextDecoderLayer=AliceAILayer):
            super().__init__(**kwargs)
