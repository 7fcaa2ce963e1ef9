"""What the tests know of FLA's Gated DeltaNet."""

from facts.family import Facts
from facts.shared import LINEAR, tiny

FACTS = Facts(
    "GatedDeltaNet",
    tiny=tiny(
        LINEAR,
        output_gate_type="silu",
        without=("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"),
    ),
    caches_prefixes=False,
    variants={
        "": {},
        "one more of some": {
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 48,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 3,
            "output_gate_type": "sigmoid",
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    },
    refused=(
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"hidden_act": "gelu"},
        {"output_gate_type": "tanh"},
        {"linear_num_key_heads": 3},
        {"linear_num_value_heads": None},
        {"linear_conv_kernel_dim": 1},
        {"intermediate_size": None},
    ),
)
