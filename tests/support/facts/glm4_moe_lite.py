"""What the tests know of GLM-4-MoE-Lite."""

from facts.family import Facts
from facts.shared import DEEPSEEK_EXPERTS, LATENT, NO_HEAD_DIM, REFUSED_LATENT, tiny, yarn

FACTS = Facts(
    "Glm4MoeLite",
    tiny=tiny(LATENT, DEEPSEEK_EXPERTS, topk_method="noaux_tc", without=NO_HEAD_DIM),
    variants={
        "yarn": yarn(),
        "": {},
        "dense layers": {
            "q_lora_rank": 64,
            "kv_lora_rank": 576,  # wider than the kernels' rows
            "first_k_dense_replace": 2,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
            "rms_norm_eps": 1e-3,
        },
    },
    refused=(
        *REFUSED_LATENT,
        {"first_k_dense_replace": None},
        {"first_k_dense_replace": 2},
        {"mlp_layer_types": ["sparse", "dense"] * 2},
        {"rope_interleave": False},
    ),
)
