"""What the tests know of Qwen3."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Qwen3",
    tiny=tiny(),
    is_tiny=False,
    options=("head_dim", "attention_bias"),
    has_head_norms=True,
)
