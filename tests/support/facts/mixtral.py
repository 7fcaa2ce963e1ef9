"""What the tests know of Mixtral."""

from facts.family import Facts
from facts.shared import LOCAL_EXPERTS, tiny

FACTS = Facts(
    "Mixtral",
    tiny=tiny(LOCAL_EXPERTS, sliding_window=None),
    refused=({"sliding_window": 24},),
)
