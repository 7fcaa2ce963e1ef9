"""DeepSeek-V3 and Moonlight: latent attention, and experts by a sigmoid with a correction."""

from attnres_serve.families import heads, hugging_face, latent
from attnres_serve.families.limits import Limit

FAMILY = hugging_face.family(
    "deepseek_v3",
    title="DeepSeek-V3",
    module="vllm.model_executor.models.deepseek_v2",
    cls="DeepseekV3ForCausalLM",
    draft=heads.DEEPSEEK,
    limits=frozenset({Limit.FLOAT16, Limit.SEQUENCE_PARALLEL, Limit.SHOWN_LAYERS}),
    is_latent=True,
    also=("head_dim", "moe_layer_freq", "scoring_func", "topk_method"),
    only=latent.ONLY,
    more_checks=(
        latent.stated({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        latent.expert_groups(smallest=2),
    ),
)
