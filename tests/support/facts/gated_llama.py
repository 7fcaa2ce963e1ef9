"""What the tests know of Llama with an attention gate."""

from facts.family import Facts

FACTS = Facts(
    "GatedLlama", options=("head_dim", "attention_bias", "mlp_bias"), has_gate=True, is_tiny=False
)
