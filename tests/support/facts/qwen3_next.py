"""What the tests know of Qwen3-Next."""

from facts.family import Facts
from facts.shared import EXPERTS, LINEAR, tiny

FACTS = Facts(
    "Qwen3Next",
    tiny=tiny(
        EXPERTS,
        LINEAR,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        partial_rotary_factor=0.25,
    ),
    workaround="portable_stock:qwen3_next",
    variants={
        "": {},
        "dense layer, older keys": {
            "layer_types": None,
            "full_attention_interval": 3,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.5,
            "rope_theta": 50000.0,
        },
    },
    refused=(
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"attention_bias": True},
        {"qkv_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": None},
        {"hidden_act": "gelu"},
        {"layer_scale": True},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": None, "full_attention_interval": 1},
        {"linear_num_value_heads": 3},
        {"linear_conv_kernel_dim": 1},
        {"num_experts": 0},
        {"num_experts_per_tok": 5},
        {"shared_expert_intermediate_size": 0},
        {"decoder_sparse_step": 5},
        {"mlp_only_layers": [0, 1, 2, 3]},
    ),
)
