"""What the tests know of Ministral 3."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Ministral3",
    tiny=tiny(  # Hugging Face's class scales queries beyond the original length.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 2048,
            "llama_4_scaling_beta": 0.1,
        }
    ),
    variants={
        "": {},
        "scaled queries": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    },
    refused=(
        {"sliding_window": 24},
        {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
)
