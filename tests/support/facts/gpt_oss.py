"""What the tests know of gpt-oss."""

from facts.family import Facts
from facts.shared import LOCAL_EXPERTS, tiny

FACTS = Facts(
    "GptOss",
    tiny=tiny(
        LOCAL_EXPERTS,
        intermediate_size=128,
        rms_norm_eps=1e-5,
        attention_bias=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    variants={"": {}, "another epsilon": {"rms_norm_eps": 1e-3}},
    refused=(
        {"head_dim": None},
        {"attention_bias": False},
        {"swiglu_limit": 5.0},
        {"tie_word_embeddings": True},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ),
)
