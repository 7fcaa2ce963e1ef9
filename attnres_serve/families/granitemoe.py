"""Granite with experts."""

from attnres_serve.families import head_checks, hugging_face

FAMILY = hugging_face.family(
    "granitemoe",
    title="Granite MoE",
    module="attnres_serve.model.granite",
    cls="GraniteMoeForCausalLM",
    also=("head_dim", "layer_types"),
    only={
        "attention_bias": (False,),  # vLLM's class has none
        "layer_types": (None,),  # where they are stated, it has windows and sinks
    },
    more_checks=(head_checks.fixed,),
)
