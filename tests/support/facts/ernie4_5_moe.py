"""What the tests know of Ernie 4.5 MoE."""

from facts.family import Facts
from facts.shared import tiny

FACTS = Facts(
    "Ernie4_5_Moe",
    tiny=tiny(
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        moe_layer_interval=1,
        use_bias=False,
    ),
    # Stock vLLM on CPU leaves out the bias that chooses experts. Where all are chosen it is
    # right, so that a twin can be compared; it is the first variant for that.
    variants={
        "all experts": {"moe_k": 4},
        "": {},
        "sparse": {"moe_layer_interval": 2, "moe_num_shared_experts": 0},
    },
    refused=({"use_bias": True}, {"moe_norm_min": 1.0}),
)
