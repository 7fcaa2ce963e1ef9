"""What the tests know of Gemma."""

from facts.family import Facts
from facts.shared import GELU, tiny

FACTS = Facts(
    "Gemma",
    tiny=tiny(hidden_act=GELU, tie_word_embeddings=True),
    refused=({"hidden_act": "silu"},),
)
