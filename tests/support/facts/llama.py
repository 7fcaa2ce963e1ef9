"""What the tests know of Llama."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Llama",
    tiny=tiny(),
    is_tiny=False,
    options=("head_dim", "attention_bias", "mlp_bias"),
    refused=({"sliding_window": 24}, {"head_dim": 15}),
)
