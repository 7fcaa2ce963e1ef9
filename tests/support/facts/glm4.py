"""What the tests know of GLM-4."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Glm4",
    tiny=tiny("glm4", "Glm4ForCausalLM", partial_rotary_factor=0.5),
    is_tiny=True,
    variants={"": {}, "biases": {"attention_bias": True}},
    refused=({"hidden_act": "gelu"}, {"partial_rotary_factor": 0}),
)
