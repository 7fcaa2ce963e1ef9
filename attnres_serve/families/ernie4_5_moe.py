"""Ernie 4.5, a mixture of experts."""

from attnres_serve.families import heads, hugging_face

FAMILY = hugging_face.family(
    "ernie4_5_moe",
    title="Ernie 4.5 MoE",
    module="vllm.model_executor.models.ernie45_moe",
    cls="Ernie4_5_MoeForCausalLM",
    draft=heads.ERNIE,
    # The last two are of training, and stand in the released models' config.json.
    also=("head_dim", "moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),
    only={
        "use_bias": (False,),  # vLLM's class has none on the output of attention
        "moe_norm_min": (1e-12,),  # vLLM's class has no least divisor
    },
)
