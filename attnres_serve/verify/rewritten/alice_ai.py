"""AliceAI in float64, for which Hugging Face has no class: its Qwen3-Next with the mixers and
routers of its Kimi Linear, which AliceAI uses.
"""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnres_serve.verify.rewritten.hugging_face import in_float64
from attnres_serve.verify.rewritten.wide import wide_module

NAME, BASE = "alice_ai", "qwen3_next"
# The names in AliceAI's format, by the roles of ``oracle.depth_names``.
DEPTH_NAMES = {
    "attention_query": "model.layers.{}.attn_res_proj.weight",
    "attention_key": "model.layers.{}.attn_res_norm_weight",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm_weight",
    "final_query": "model.attnres_final.res_proj.weight",
    "final_key": "model.attnres_final.res_norm_weight",
}
_MODELING = "transformers.models.{0}.modeling_{0}"
_FORGET = re.compile(r"\.linear_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def first_site_tensors(hidden: int) -> dict[str, Tensor]:
    """Stand-ins for the tensors of the first site, which AliceAI's format does not store."""
    query, key = (DEPTH_NAMES[f"attention_{part}"].format(0) for part in ("query", "key"))
    zeros, ones = torch.zeros(1, hidden, dtype=torch.float64), torch.ones(hidden).double()
    return {query: zeros, key: ones}


def build(config: Any, weights: Mapping[str, Tensor]) -> Any:
    """The causal language model.

    Args:
        config: Hugging Face's configuration of Qwen3-Next, with AliceAI's numbers.
        weights: every tensor except those of sites, by its name in a checkpoint.

    Raises:
        ValueError: the model needs other tensors.
    """
    qwen, kimi = (wide_module(_MODELING.format(name)) for name in (BASE, "kimi_linear"))
    sizes = SimpleNamespace(
        hidden_size=config.hidden_size,
        hidden_act=config.hidden_act,
        rms_norm_eps=config.rms_norm_eps,
        layer_types=config.layer_types,
        linear_num_heads=config.linear_num_key_heads,
        linear_head_dim=config.linear_key_head_dim,
        linear_conv_kernel_dim=config.linear_conv_kernel_dim,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
    )
    model = qwen.Qwen3NextForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        if config.layer_types[number] == "linear_attention":
            layer.linear_attn = kimi.KimiLinearDeltaAttention(sizes, number)
        layer.mlp.gate = kimi.KimiLinearTopkRouter(sizes)
    model = in_float64(model.eval())
    try:
        model.load_state_dict(_by_modules(weights, config.num_experts))
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"missing, unexpected or misshapen tensors: {error}") from error
    return model


def _by_modules(weights: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """The tensors by the names of modules, with convolutions and experts fused."""
    fused: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        name = name.replace("a_log_bias", "A_log")
        if name.startswith("mtp."):
            continue
        if name.endswith(".q_conv1d.weight"):
            parts = [weights[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
            fused[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
        elif name.endswith(".experts.0.gate_proj.weight"):
            stem = name.removesuffix("0.gate_proj.weight")
            gate, up, down = (
                torch.stack([weights[f"{stem}{i}.{part}_proj.weight"] for i in range(experts)])
                for part in ("gate", "up", "down")
            )
            fused |= {f"{stem}gate_up_proj": torch.cat([gate, up], 1), f"{stem}down_proj": down}
        elif not _EXPERT.search(name) and not name.endswith("_conv1d.weight"):
            fused[_FORGET.sub(r".linear_attn.forget_gate.\1", name)] = tensor
    return fused
