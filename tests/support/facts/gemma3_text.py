"""What the tests know of Gemma 3."""

from facts.family import Facts
from facts.shared import GELU, WINDOWS, tiny

FACTS = Facts(
    "Gemma3",
    tiny=tiny(
        WINDOWS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        },
        hidden_activation=GELU,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
        without=("hidden_act",),
    ),
    norms={"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
    variants={
        "": {},
        "older keys": {
            "attention_bias": True,
            "layer_types": None,
            "rope_local_base_freq": 20000.0,
            "rope_parameters": None,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_theta": 60000.0,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    },
    refused=(
        {"use_bidirectional_attention": True},
        {"attn_logit_softcapping": 50.0},
        {"hidden_activation": "silu"},
        {"sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
)
