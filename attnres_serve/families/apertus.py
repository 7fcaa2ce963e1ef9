"""Apertus: an MLP without a gate, whose activation xIELU has parameters."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "apertus",
    title="Apertus",
    module="vllm.model_executor.models.apertus",
    cls="ApertusForCausalLM",
    norms=("attention_layernorm", "feedforward_layernorm"),
    also=("head_dim", "qk_norm"),
    activations=("xielu",),
    only={"qk_norm": (True,)},  # neither class reads it; heads have norms always
    limits=frozenset(),
)
