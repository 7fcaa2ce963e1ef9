"""Qwen3-MoE."""

from attnres_serve.families import hugging_face
from attnres_serve.families.limits import Limit

FAMILY = hugging_face.family(
    "qwen3_moe",
    title="Qwen3-MoE",
    module="vllm.model_executor.models.qwen3_moe",
    cls="Qwen3MoeForCausalLM",
    limits=frozenset({Limit.EXPERTS}),
    also=("head_dim",),
    # With biases, Hugging Face's class has one on the output too.
    only={"attention_bias": (False,), "use_sliding_window": (False,)},
)
