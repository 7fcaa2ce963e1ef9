"""Ernie 4.5, dense."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "ernie4_5",
    title="Ernie 4.5",
    module="vllm.model_executor.models.ernie45",
    cls="Ernie4_5ForCausalLM",
    only={"use_bias": (False,)},  # vLLM's class removes the bias of the output
    limits=frozenset(),
)
