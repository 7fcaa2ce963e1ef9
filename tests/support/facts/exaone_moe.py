"""What the tests know of EXAONE-MoE."""

from facts.family import Facts
from facts.shared import EXPERTS, WINDOWS, tiny

FACTS = Facts(
    "ExaoneMoe",
    tiny=tiny(
        EXPERTS,
        WINDOWS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        sliding_window_pattern="LLLG",
    ),
    variants={
        "": {},
        "groups": {
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        },
    },
    refused=(
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": None},
        {"sliding_window": None},
        {"swiglu_limits": [7.0] * 4},
        {"n_group": 3},
        {"num_experts": 0},
    ),
)
