"""What the tests know of Llama with norms of queries and of rotated keys."""

from facts.family import Facts

FACTS = Facts(
    "NormedLlama",
    options=("head_dim", "attention_bias", "mlp_bias"),
    has_head_norms=True,
    is_tiny=False,
)
