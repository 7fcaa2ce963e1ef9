"""What the tests know of Qwen3-MoE."""

from facts.family import Facts
from facts.shared import EXPERTS, tiny

FACTS = Facts(
    "Qwen3Moe",
    tiny=tiny(
        EXPERTS, num_experts=8, decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[]
    ),
    variants={"": {}, "dense layer": {"mlp_only_layers": [1], "norm_topk_prob": False}},
    refused=({"attention_bias": True}, {"use_sliding_window": True}),
)
