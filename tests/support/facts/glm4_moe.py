"""What the tests know of GLM-4-MoE."""

from facts.family import Facts
from facts.shared import DEEPSEEK_EXPERTS, tiny

FACTS = Facts(
    "Glm4Moe",
    tiny=tiny(
        DEEPSEEK_EXPERTS, partial_rotary_factor=0.5, use_qk_norm=True, without=("moe_layer_freq",)
    ),
    variants={
        "": {},
        "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        "plain": {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
    },
    refused=(
        {"head_dim": None},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
        {"n_group": 8},
        {"topk_group": 2},
    ),
)
