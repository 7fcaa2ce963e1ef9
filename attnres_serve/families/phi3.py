"""Phi-3: Llama with fused projections, without windows."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "phi3",
    title="Phi-3",
    module="vllm.model_executor.models.phi3",
    cls="Phi3ForCausalLM",
    # vLLM's class has neither windows nor biases.
    only={"sliding_window": (None,), "attention_bias": (False,)},
    rotates_part=True,
    limits=frozenset(),
)
