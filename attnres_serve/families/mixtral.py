"""Mixtral: Mistral's attention and a mixture of experts, without windows."""

from attnres_serve.families import hugging_face
from attnres_serve.families.limits import Limit

FAMILY = hugging_face.family(
    "mixtral",
    title="Mixtral",
    module="vllm.model_executor.models.mixtral",
    cls="MixtralForCausalLM",
    limits=frozenset({Limit.EXPERTS, Limit.SHOWN_LAYERS}),
    only={"sliding_window": (None,)},
)
