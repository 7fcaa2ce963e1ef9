"""What the tests know of LFM2."""

from facts.family import Facts
from facts.shared import NORM_EPS, SHORT_CONVOLUTION, tiny

FACTS = Facts(
    "Lfm2",
    tiny=tiny(
        SHORT_CONVOLUTION,
        conv_dim=128,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=1,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
        without=NORM_EPS,
    ),
    norms={"attention": "operator_norm", "mlp": "ffn_norm"},
    final_norm="embedding_norm",
    workaround="rotary:PATCH",
    variants={
        "": {},
        "biases and older keys": {
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 288,
            "block_multiple_of": 64,
            "conv_bias": True,
            "full_attn_idxs": [1, 2],
            "layer_types": None,
            "tie_embedding": True,
        },
    },
    refused=(
        {"conv_dim": 256},
        {"block_dim": 256},
        {"tie_word_embeddings": False},
        {"tie_embedding": False},
        {"head_dim": 64},
        {"layer_types": ["conv"] * 3 + ["sliding_attention"]},
    ),
)
