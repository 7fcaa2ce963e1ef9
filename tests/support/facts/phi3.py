"""What the tests know of Phi-3."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Phi3",
    tiny=tiny(sliding_window=None, original_max_position_embeddings=2048),
    refused=({"sliding_window": 24}, {"hidden_act": "gelu"}),
)
