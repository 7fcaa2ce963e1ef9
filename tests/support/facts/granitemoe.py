"""What the tests know of Granite MoE."""

from facts.family import Facts
from facts.shared import LOCAL_EXPERTS, MULTIPLIERS, NO_HEAD_DIM, tiny

FACTS = Facts(
    "GraniteMoe",
    tiny=tiny(LOCAL_EXPERTS, MULTIPLIERS, without=NO_HEAD_DIM),
    refused=({"attention_bias": True}, {"head_dim": 64}),
)
