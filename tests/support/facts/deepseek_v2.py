"""What the tests know of DeepSeek-V2."""

from facts.family import Facts
from facts.shared import DEEPSEEK_EXPERTS, LATENT, NO_HEAD_DIM, REFUSED_LATENT, tiny, yarn

FACTS = Facts(
    "DeepseekV2",
    tiny=tiny(
        LATENT,
        DEEPSEEK_EXPERTS,
        # Hugging Face's class ignores it, vLLM's does not.
        norm_topk_prob=False,
        topk_method="greedy",
        without=NO_HEAD_DIM,
    ),
    variants={
        "yarn": yarn(mscale=0.707, mscale_all_dim=0.707),
        "": {},
        "query latent, groups, another epsilon": {
            "q_lora_rank": 64,
            "kv_lora_rank": 48,  # less than a head has
            "qk_rope_head_dim": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rms_norm_eps": 1e-3,
        },
    },
    refused=(
        *REFUSED_LATENT,
        {"norm_topk_prob": True},
        {"n_group": 2},
        {"n_group": None},
        {"topk_method": "noaux_tc"},
        {"scoring_func": "sigmoid"},
        {"mlp_bias": True},
    ),
)
