"""What the tests know of Ernie 4.5."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Ernie4_5",
    tiny=tiny("ernie4_5", "Ernie4_5ForCausalLM", use_bias=False),
    is_tiny=True,
    refused=({"use_bias": True},),
)
