"""What the tests know of GLM-4."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Glm4",
    tiny=tiny(partial_rotary_factor=0.5),
    variants={"": {}, "biases": {"attention_bias": True}},
    refused=({"hidden_act": "gelu"}, {"partial_rotary_factor": 0}),
)
