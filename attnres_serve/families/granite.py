"""Granite: multipliers of the embedding, of attention, of what a sublayer gives and of logits."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "granite",
    title="Granite",
    module="attnres_serve.model.granite",
    cls="GraniteForCausalLM",
    also=("head_dim", "layer_types"),
    # vLLM's class has windows and sinks where kinds of layers are stated.
    only={"layer_types": (None,)},
)
