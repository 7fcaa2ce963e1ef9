"""FLA's Kimi Delta Attention: vLLM's recurrence in every layer, with FLA's tensor names."""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.models.utils import WeightsMapper

from attnres_serve.model import delta_net

FUSED = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def attention(
    config: PretrainedConfig, vllm_config: VllmConfig, prefix: str, **more: Any
) -> nn.Module:
    """vLLM's layer of Kimi Delta Attention, configured by the usual keys of linear layers."""
    layer_config = copy(config)
    layer_config.linear_attn_config = {
        "head_dim": config.linear_key_head_dim,
        "num_heads": config.linear_num_key_heads,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        **more,
    }
    # Looked up in its module: on CPU another class may be there, see ``linear_attention``.
    layer: nn.Module = kimi_gdn_linear_attn.KimiGatedDeltaNetAttention(
        layer_config, vllm_config, prefix
    )
    layer.o_norm.eps = config.rms_norm_eps  # vLLM's layer for GPUs always has 1e-5
    convolution = layer.conv1d.weight
    convolution.weight_loader = delta_net.by_place(convolution.weight_loader)
    return layer


class KDALayer(delta_net.DeltaNetLayer):
    def recurrence(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str
    ) -> nn.Module:
        bound = config.gate_lower_bound
        layer = attention(config, vllm_config, prefix, gate_lower_bound=bound)
        layer.g_b_proj = ColumnParallelLinear(  # vLLM's projection has no bias
            layer.head_dim, layer.projection_size, prefix=f"{prefix}.g_b_proj"
        )
        return layer

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        mixed: Tensor = self.self_attn(hidden_states=hidden_states, positions=positions)
        return mixed


class KDAStates:
    """Shapes and dtypes of vLLM's cache for a sequence."""

    @classmethod
    def get_mamba_state_dtype_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[torch.dtype, torch.dtype]:
        cache = vllm_config.cache_config
        dtypes: tuple[torch.dtype, torch.dtype] = MambaStateDtypeCalculator.kda_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype
        )
        return dtypes

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        config = vllm_config.model_config.hf_text_config
        shapes: tuple[tuple[int, int], tuple[int, int, int]]
        shapes = MambaStateShapeCalculator.kda_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            conv_kernel_size=config.linear_conv_kernel_dim,
            num_spec=vllm_config.num_speculative_tokens,
        )
        return shapes


class KDAForCausalLM(KDAStates, delta_net.DeltaNetForCausalLM):
    layer = KDALayer
    packed_modules_mapping: ClassVar = {whole: list(parts) for whole, parts in FUSED.items()}
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=delta_net.stacked(FUSED))
    get_mamba_state_copy_func = MambaStateCopyFuncCalculator.kda_state_copy_func
