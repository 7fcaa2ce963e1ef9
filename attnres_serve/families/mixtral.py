"""Mixtral: Mistral's attention and a mixture of experts, without windows."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "mixtral",
    title="Mixtral",
    module="vllm.model_executor.models.mixtral",
    cls="MixtralForCausalLM",
    only={"sliding_window": (None,)},
)
