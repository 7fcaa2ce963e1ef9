"""What the tests know of Kimi Linear."""

from typing import Any

from facts.family import Facts
from facts.shared import LATENT, NO_HEAD_DIM, Config, tiny

KIMI_EXPERTS: Config = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
}
KIMI_LAYERS: Config = {
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2],
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
}
KIMI_ODD: tuple[dict[str, Any], ...] = (
    {"full_attn_layers": [2, 3]},
    {"kda_layers": [1, 3]},
    {"kda_layers": [1, 3, 4, 5]},
    {"kda_layers": [0, 1, 3, 4]},
    {"head_dim": None},
    {"use_full_rank_gate": "yes"},
    {"gate_lower_bound": -6.0},
    {"gate_lower_bound": 0},
    {"another": True},
)

FACTS = Facts(
    "KimiLinear",
    tiny=tiny(LATENT, KIMI_EXPERTS, KIMI_LAYERS, without=NO_HEAD_DIM),
    caches_prefixes=False,
    workaround="portable_stock:kimi_linear",
    variants={
        "": {},
        "query latent, groups, another epsilon, no shared part of keys": {
            "qk_rope_head_dim": 0,
            "q_lora_rank": 64,
            "first_k_dense_replace": 2,
            "num_shared_experts": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "rms_norm_eps": 1e-3,
        },
        "two of each, wider heads, narrow rows": {
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "first_k_dense_replace": 0,
            "linear_attn_config": {
                "kda_layers": [2, 3],
                "full_attn_layers": [1, 4],
                "head_dim": 48,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
            },
        },
    },
    refused=(
        {"num_key_value_heads": 2},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"kv_lora_rank": None},
        {"qk_rope_head_dim": None},
        {"qk_rope_head_dim": -32},
        {"qk_rope_head_dim": False},
        {"mla_use_nope": False},
        {"mla_use_output_gate": 1.5},
        {"moe_layer_freq": 2},
        {"moe_router_activation_func": "softmax"},
        {"use_grouped_topk": False},
        {"topk_group": 3},
        {"num_expert_group": 8},
        {"num_experts_per_token": 9},
        {"n_shared_experts": 2},
        {"routed_scaling_factor": None},
        {"first_k_dense_replace": None},
        {"mlp_layer_types": ["dense"] * 4},
        {"linear_head_dim": 64},
        {"hidden_act": "situ"},
        {"hidden_act": "situ", "activation_situ_beta": 0},
        {"activation_situ_beta": 2.0},
        {"routed_expert_hidden_size": 0},
        {"latent_moe_use_norm": "yes"},
        {"num_experts_per_token": 1},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"linear_attn_config": None},
        *({"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | one} for one in KIMI_ODD),
    ),
)
