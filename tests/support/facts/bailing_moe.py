"""What the tests know of Ling 2."""

from facts.family import Facts
from facts.shared import BAILING, REFUSED_BAILING, tiny

FACTS = Facts(
    "BailingMoeV2",
    tiny=tiny(BAILING, use_rmsnorm=True, embedding_dropout=0.0, rotary_dim=16),
    workaround="portable_stock:bailing_moe",
    variants={
        "": {},
        "two shared experts, no dense layer": {
            "num_shared_experts": 2,
            "moe_shared_expert_intermediate_size": 64,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "partial_rotary_factor": 1.0,
            "rotary_dim": 32,
            "rms_norm_eps": 1e-3,
        },
    },
    refused=(
        *REFUSED_BAILING,
        {"use_qkv_bias": True},
        {"use_rmsnorm": None},
        {"moe_router_enable_expert_bias": False},
        {"norm_topk_prob": False},
        {"rotary_dim": 32},
        {"moe_shared_expert_intermediate_size": 32},
        {"partial_rotary_factor": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    ),
)
