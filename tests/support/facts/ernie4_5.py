"""What the tests know of Ernie 4.5."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Ernie4_5",
    tiny=tiny(use_bias=False),
    refused=({"use_bias": True},),
)
