"""OLMoE: a query and a key norm over all heads at once."""

from attnres_serve.families import head_checks, hugging_face

FAMILY = hugging_face.family(
    "olmoe",
    title="OLMoE",
    module="vllm.model_executor.models.olmoe",
    cls="OlmoeForCausalLM",
    also=("head_dim",),
    more_checks=(head_checks.fixed,),
    # vLLM's class has these fixed, and always a separate head.
    only={
        "norm_topk_prob": (False,),
        "attention_bias": (False,),
        "clip_qkv": (None,),
        "tie_word_embeddings": (False,),
    },
    has_fixed_eps=True,
)
