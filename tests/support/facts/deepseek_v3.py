"""What the tests know of DeepSeek-V3."""

from facts.family import Facts
from facts.shared import (
    DEEPSEEK_EXPERTS,
    LATENT,
    NARROW_ROWS,
    NO_HEAD_DIM,
    REFUSED_LATENT,
    Config,
    tiny,
    yarn,
)

SIGMOID: Config = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

FACTS = Facts(
    "DeepseekV3",
    tiny=tiny(
        LATENT,
        DEEPSEEK_EXPERTS,
        SIGMOID,
        q_lora_rank=64,
        n_group=2,
        routed_scaling_factor=2.5,
        without=NO_HEAD_DIM,
    ),
    variants={
        "yarn": yarn(mscale=1.0, mscale_all_dim=0.5),
        "": {},
        "moonlight": {"q_lora_rank": None, "n_group": 1, "routed_scaling_factor": 2.446},
        "another epsilon": {"rms_norm_eps": 1e-3, "norm_topk_prob": False},
        "narrow rows": NARROW_ROWS,
    },
    refused=(
        *REFUSED_LATENT,
        {"topk_method": None},
        {"scoring_func": "softmax"},
        {"rope_interleave": False},
        {"n_group": 8},
    ),
)
