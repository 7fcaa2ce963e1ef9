"""FLA's Gated DeltaNet: every layer has vLLM's recurrence, by FLA's names of tensors."""

from typing import ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.models.utils import WeightsMapper

from attnres_serve.model import delta_net

FUSED = {
    "in_proj_qkvz": ("q_proj", "k_proj", "v_proj", "g_proj"),
    "in_proj_ba": ("b_proj", "a_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class GatedDeltaNetLayer(delta_net.DeltaNetLayer):
    def recurrence(
        self, config: PretrainedConfig, vllm_config: VllmConfig, prefix: str
    ) -> nn.Module:
        # By its module: on CPU the class may be another, see ``linear_attention``.
        layer = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention(
            config, vllm_config, prefix, gqa_interleaved_layout=False
        )
        channels = (layer.key_dim, layer.key_dim, layer.value_dim)
        rows = tuple(size // layer.tp_size for size in channels)
        delta_net.load_by_place(layer.conv1d, rows, layer.tp_rank)
        return layer


@support_torch_compile
class GatedDeltaNetDecoder(delta_net.DeltaNetDecoder):
    layer = GatedDeltaNetLayer


class GatedDeltaNetForCausalLM(delta_net.DeltaNetForCausalLM):
    decoder = GatedDeltaNetDecoder
    packed_modules_mapping: ClassVar = {whole: list(parts) for whole, parts in FUSED.items()}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".o_norm.": ".norm.", ".o_proj.": ".out_proj."},
        orig_to_new_stacked=delta_net.stacked(FUSED),
    )

    @classmethod
    def get_mamba_state_dtype_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[torch.dtype, torch.dtype]:
        cache = vllm_config.cache_config
        dtypes: tuple[torch.dtype, torch.dtype]
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )
        return dtypes

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        config = vllm_config.model_config.hf_config
        shapes: tuple[tuple[int, int], tuple[int, int, int]]
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            vllm_config.num_speculative_tokens,
        )
        return shapes

    get_mamba_state_copy_func = MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func
