"""What the tests know of Granite MoE."""

from facts.family import Facts
from facts.shared import LOCAL_EXPERTS, MULTIPLIERS, NO_HEAD_DIM, tiny

FACTS = Facts(
    "GraniteMoe",
    tiny=tiny(
        "granitemoe", "GraniteMoeForCausalLM", LOCAL_EXPERTS, MULTIPLIERS, without=NO_HEAD_DIM
    ),
    is_tiny=True,
    refused=({"attention_bias": True}, {"head_dim": 64}),
)
