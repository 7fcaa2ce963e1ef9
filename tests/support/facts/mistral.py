"""What the tests know of Mistral."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Mistral",
    tiny=tiny(sliding_window=None),
    is_tiny=False,
    variants={
        "": {"sliding_window": None},
        "window": {"sliding_window": 24},
        "stated window": {"sliding_window": 24, "layer_types": ["sliding_attention"] * 4},
    },
    refused=(
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"sliding_window": 24, "layer_types": ["full_attention"] * 2},
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
    ),
)
