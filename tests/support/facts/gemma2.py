"""What the tests know of Gemma 2."""

from facts.family import Facts
from facts.shared import GELU, tiny

FACTS = Facts(
    "Gemma2",
    tiny=tiny(
        hidden_act=GELU,
        hidden_activation=GELU,
        query_pre_attn_scalar=32,
        sliding_window=64,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    norms={"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
    refused=({"hidden_activation": "silu"}, {"layer_types": ["conv"] * 4}),
)
