"""What the tests know of LFM2-MoE."""

from facts.family import Facts
from facts.shared import EXPERTS, NORM_EPS, SHORT_CONVOLUTION, tiny

FACTS = Facts(
    "Lfm2Moe",
    tiny=tiny(
        SHORT_CONVOLUTION,
        EXPERTS,
        num_dense_layers=1,
        use_expert_bias=True,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        without=NORM_EPS,
    ),
    norms={"attention": "operator_norm", "mlp": "ffn_norm"},
    final_norm="embedding_norm",
    workaround="rotary:PATCH",
    variants={
        "": {},
        "no bias of experts": {
            "conv_bias": True,
            "norm_topk_prob": False,
            "num_dense_layers": 2,
            "routed_scaling_factor": 1.5,
            "use_expert_bias": False,
        },
    },
    refused=(
        {"tie_word_embeddings": False},
        {"tie_embedding": False},
        {"head_dim": 64},
        {"layer_types": ["conv"] * 3 + ["sliding_attention"]},
    ),
)
