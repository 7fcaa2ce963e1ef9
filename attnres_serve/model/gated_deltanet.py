"""FLA's Gated DeltaNet: vLLM's recurrence in every layer, with FLA's tensor names."""

from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
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
        # Looked up in its module: on CPU another class may be there, see ``linear_attention``.
        layer = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention(
            config, vllm_config, prefix, gqa_interleaved_layout=False
        )
        channels = [layer.key_dim, layer.key_dim, layer.value_dim]
        load = kimi_gdn_linear_attn._make_fused_conv1d_weight_loader(
            channels, layer.tp_size, layer.tp_rank
        )
        layer.conv1d.weight.weight_loader = delta_net.by_place(load)
        return layer


class GatedDeltaNetForCausalLM(delta_net.DeltaNetForCausalLM):
    layer = GatedDeltaNetLayer
    packed_modules_mapping: ClassVar = {whole: list(parts) for whole, parts in FUSED.items()}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".o_norm.": ".norm.", ".o_proj.": ".out_proj."},
        orig_to_new_stacked=delta_net.stacked(FUSED),
    )
    # vLLM's cache for a sequence, as in Qwen3-Next: the same recurrence and keys.
    get_mamba_state_dtype_from_config = Qwen3NextForCausalLM.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = Qwen3NextForCausalLM.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = Qwen3NextForCausalLM.get_mamba_state_copy_func
