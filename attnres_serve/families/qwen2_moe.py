"""Qwen2-MoE: chosen experts, and a shared one that sees every token."""

from attnres_serve.families import head_checks, hugging_face

FAMILY = hugging_face.family(
    "qwen2_moe",
    title="Qwen2-MoE",
    module="vllm.model_executor.models.qwen2_moe",
    cls="Qwen2MoeForCausalLM",
    also=("head_dim",),
    more_checks=(head_checks.fixed,),
    only={"qkv_bias": (True,), "use_sliding_window": (False,)},
)
