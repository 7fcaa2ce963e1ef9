"""What the tests know of OLMoE."""

from facts.family import Facts
from facts.shared import NO_HEAD_DIM, tiny

FACTS = Facts(
    "Olmoe",
    tiny=tiny(num_experts=4, num_experts_per_tok=2, num_key_value_heads=4, without=NO_HEAD_DIM),
    variants={"": {}, "another epsilon": {"rms_norm_eps": 0.3}},
    refused=({"norm_topk_prob": True}, {"clip_qkv": 8.0}),
)
