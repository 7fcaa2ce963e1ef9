"""What the tests know of Ring-linear."""

from facts.family import Facts
from facts.shared import EXPERTS, LATENT, tiny

FACTS = Facts(
    "BailingMoeV2_5",
    tiny=tiny(
        "bailing_hybrid",
        "BailingMoeV2_5ForCausalLM",
        LATENT,
        EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=True,
        layer_group_size=2,
        group_norm_size=2,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
    ),
    is_tiny=True,
    caches_prefixes=False,
    workaround="portable_stock:bailing_hybrid",
    variants={
        "": {},
        "query latent, other groups": {
            "q_lora_rank": 64,
            "layer_group_size": 4,
            "group_norm_size": 1,
            "first_k_dense_replace": 0,
        },
    },
    refused=(
        {"num_key_value_heads": 2},
        {"layer_group_size": 3},
        {"layer_group_size": 1},
        {"group_norm_size": 3},
        {"use_bias": True},
        {"use_qk_norm": False},
        {"linear_silu": True},
        {"score_function": "softmax"},
        {"router_dtype": "bf16"},
        {"rms_norm_eps": 1e-5},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_theta": None},
        {"head_dim": None},
        {"n_group": 3},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
    ),
)
