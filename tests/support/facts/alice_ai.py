"""What the tests know of AliceAI."""

from facts.family import Facts
from facts.shared import EXPERTS, LINEAR, tiny

FACTS = Facts(
    "AliceAI",
    tiny=tiny(
        EXPERTS,
        LINEAR,
        num_experts=8,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=2,
        linear_value_head_dim=32,
        partial_rotary_factor=0.25,
        without=("intermediate_size",),
    ),
    variants={
        "": {},
        "one more of some": {
            "head_dim": 64,
            "linear_key_head_dim": 48,
            "linear_value_head_dim": 48,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
            "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-3,
        },
    },
    refused=(
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": None},
        {"hidden_act": "gelu"},
        {"layer_types": None},
        {"layer_types": ["linear_attention"] * 4},
        {"partial_rotary_factor": None},
        {"linear_num_value_heads": 4},
        {"linear_value_head_dim": 64},
        {"linear_conv_kernel_dim": 1},
        {"num_experts": 1},
        {"num_experts_per_tok": 9},
        {"shared_expert_intermediate_size": 0},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"kda_allow_negative_eigenvalues": True},
        {"router_score_function": "softmax"},
        {"router_bias_correction": False},
        {"mtp_num_hidden_layers": "one"},
    ),
)
