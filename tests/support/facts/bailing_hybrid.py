"""What the tests know of Ring-linear."""

from facts.family import Facts
from facts.shared import BAILING, LATENT, REFUSED_BAILING, tiny

FACTS = Facts(
    "BailingMoeV2_5",
    tiny=tiny(LATENT, BAILING, layer_group_size=2, group_norm_size=2),
    caches_prefixes=False,
    workaround="portable_stock:bailing_hybrid",
    variants={
        "": {},
        "query latent, other groups": {
            "q_lora_rank": 64,
            "kv_lora_rank": 96,
            "qk_rope_head_dim": 24,
            "layer_group_size": 4,
            "group_norm_size": 1,
            "first_k_dense_replace": 0,
        },
    },
    refused=(
        *REFUSED_BAILING,
        {"num_key_value_heads": 2},
        {"layer_group_size": 3},
        {"layer_group_size": 1},
        {"group_norm_size": 3},
        {"use_qk_norm": False},
        {"score_function": None},
        {"norm_topk_prob": None},
        {"moe_router_enable_expert_bias": None},
        {"use_rmsnorm": False},
        {"rotary_dim": 4},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"linear_silu": True},
        {"rms_norm_eps": 1e-5},
    ),
)
