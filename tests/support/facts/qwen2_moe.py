"""What the tests know of Qwen2-MoE."""

from facts.family import Facts
from facts.shared import EXPERTS, NO_HEAD_DIM, tiny

FACTS = Facts(
    "Qwen2Moe",
    tiny=tiny(
        EXPERTS,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        without=NO_HEAD_DIM,
    ),
    variants={"": {}, "dense layer": {"mlp_only_layers": [1]}},
    refused=({"qkv_bias": False}, {"use_sliding_window": True}, {"head_dim": 64}),
)
