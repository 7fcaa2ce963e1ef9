"""What the tests know of Granite."""

from facts.family import Facts
from facts.shared import MULTIPLIERS, NO_HEAD_DIM, tiny

FACTS = Facts(
    "Granite",
    tiny=tiny(MULTIPLIERS, without=NO_HEAD_DIM),
    variants={"": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    refused=({"layer_types": ["full_attention"] * 4}, {"layer_rope_theta": [0.0] * 4}),
)
