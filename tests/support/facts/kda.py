"""What the tests know of FLA's Kimi Delta Attention."""

from facts.family import Facts
from facts.shared import LINEAR, tiny

FACTS = Facts(
    "KDA",
    tiny=tiny(
        LINEAR,
        gate_lower_bound=None,
        without=(
            *("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"),
            *("linear_num_value_heads", "linear_value_head_dim"),
        ),
    ),
    caches_prefixes=False,
    variants={
        "": {},
        "one more of some": {
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 48,
            "linear_conv_kernel_dim": 3,
            "gate_lower_bound": -2.5,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    },
    refused=(
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"hidden_act": "gelu"},
        {"gate_lower_bound": 0},
        {"gate_lower_bound": -6.0},
        {"linear_num_key_heads": None},
        {"linear_conv_kernel_dim": 1},
        {"intermediate_size": None},
    ),
)
