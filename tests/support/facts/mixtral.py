"""What the tests know of Mixtral."""

from facts.family import Facts
from facts.shared import LOCAL_EXPERTS, tiny

FACTS = Facts(
    "Mixtral",
    tiny=tiny("mixtral", "MixtralForCausalLM", LOCAL_EXPERTS, sliding_window=None),
    is_tiny=True,
    refused=({"sliding_window": 24},),
)
