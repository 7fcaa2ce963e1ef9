"""What the tests know of Phi-3."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Phi3",
    tiny=tiny(
        "phi3", "Phi3ForCausalLM", sliding_window=None, original_max_position_embeddings=2048
    ),
    is_tiny=True,
    refused=({"sliding_window": 24}, {"hidden_act": "gelu"}),
)
