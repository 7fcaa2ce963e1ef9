"""What the tests know of Llama 4."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Llama4",
    tiny=tiny(
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=256,
        attention_chunk_size=128,
        no_rope_layers=[1, 0, 1, 1],
        attn_temperature_tuning=False,
        use_qk_norm=True,
    ),
    variants={
        "": {},
        # The twin is the first variant's: stock vLLM has the temperature by --max-model-len.
        "temperature": {
            "attn_temperature_tuning": True,
            "floor_scale": 32,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 1,
        },
    },
    refused=(
        {"attention_bias": True},
        {"num_experts_per_tok": 2},
        {"head_dim": None},
        {"attention_chunk_size": None},
        {"attention_chunk_size": 64},
        {"no_rope_layer_interval": 0},
        {"no_rope_layers": [1]},
        {"layer_types": ["full_attention"] * 4},
        {"moe_layers": [0]},
    ),
)
