"""What the tests know of Gemma."""

from facts.family import Facts
from facts.shared import GELU, tiny

FACTS = Facts(
    "Gemma",
    tiny=tiny("gemma", "GemmaForCausalLM", hidden_act=GELU, tie_word_embeddings=True),
    is_tiny=True,
    refused=({"hidden_act": "silu"},),
)
