"""What the tests know of Nemotron-H."""

from facts.family import Facts
from facts.shared import STATE_SPACE, tiny

FACTS = Facts(
    "NemotronH",
    tiny=tiny(
        STATE_SPACE,
        hybrid_override_pattern="M*M-",
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        mlp_hidden_act="relu2",
        use_conv_bias=True,
        use_bias=False,
        mamba_proj_bias=False,
        mlp_bias=False,
        attention_bias=False,
        time_step_min=1e-6,
        without=("rms_norm_eps", "hidden_act"),
    ),
    norms={"mixer": "norm"},
    final_norm="norm_f",
    caches_prefixes=False,
    sublayers=("mixer",),
    variants={"": {}, "groups": {"n_groups": 2, "use_bias": True, "mlp_bias": True}},
    refused=(
        {"time_step_min": 0.001},
        {"hybrid_override_pattern": "M*E-"},
        {"hybrid_override_pattern": "M*-"},
        {"attention_bias": True},
        {"mlp_hidden_act": "silu"},
        {"tie_word_embeddings": True},
        {"sliding_window": 24},
    ),
)
