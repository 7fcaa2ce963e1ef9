"""What the tests know of Apertus."""

from facts.family import Facts
from facts.shared import NO_HEAD_DIM, tiny

FACTS = Facts(
    "Apertus",
    tiny=tiny(hidden_act="xielu", without=NO_HEAD_DIM),
    norms={"attention": "attention_layernorm", "mlp": "feedforward_layernorm"},
    workaround="xielu:PATCH",
    variants={"": {}, "biases": {"attention_bias": True, "tie_word_embeddings": True}},
    refused=(
        {"hidden_act": "silu"},
        {"logit_scale": 2.0},
        {"qkv_bias": True},
        {"qk_norm": False},
    ),
)
