"""Granite: multipliers of the embedding, attention, sublayer outputs and logits."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "granite",
    title="Granite",
    module="attnres_serve.model.granite",
    cls="GraniteForCausalLM",
    also=("head_dim", "layer_types"),
    # With stated kinds of layers, vLLM's class has windows and sinks.
    only={"layer_types": (None,)},
)
