"""What the tests know of AFMoE."""

from facts.family import Facts
from facts.shared import EXPERTS, WINDOWS, tiny

FACTS = Facts(
    "Afmoe",
    tiny=tiny(
        EXPERTS,
        WINDOWS,
        num_dense_layers=1,
        num_shared_experts=1,
        route_scale=2.5,
        mup_enabled=True,
    ),
    norms={"attention": "input_layernorm", "mlp": "pre_mlp_layernorm"},
    # Stock vLLM runs only where the routing is stated; it is the first variant for the twin.
    variants={
        "stated routing": {
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
        "": {},
        "kinds of layers not stated": {
            "layer_types": None,
            "global_attn_every_n_layers": 2,
            "mup_enabled": False,
            "num_dense_layers": 2,
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-3,
        },
        "full attention": {"num_dense_layers": 0, "layer_types": ["full_attention"] * 4},
    },
    refused=(
        {"score_func": "softmax"},
        {"route_norm": False},
        {"n_group": 2},
        {"topk_group": None},
        {"num_experts": 1},
        {"num_experts_per_tok": 5},
        {"num_dense_layers": None},
        {"num_shared_experts": 0},
        {"route_scale": None},
        {"head_dim": None},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
        {"sliding_window": None},
        {"layer_types": ["conv"] * 4},
    ),
)
