"""What the tests know of Mamba2."""

from facts.family import Facts
from facts.shared import STATE_SPACE, tiny

FACTS = Facts(
    "Mamba2",
    tiny=tiny(
        STATE_SPACE,
        num_heads=8,
        state_size=32,
        time_step_rank=8,
        without=("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    ),
    norms={"mixer": "norm"},
    final_norm="norm_f",
    has_stages=False,
    caches_prefixes=False,
    sublayers=("mixer",),
    variants={"": {}, "biases": {"use_bias": True, "tie_word_embeddings": True}},
    refused=(
        {"n_groups": 2},
        {"rms_norm": False},
        {"time_step_limit": [0.01, 1.0]},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-5},
    ),
)
