"""GLM-4: norms also after the sublayers, which belong to their outputs."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "glm4",
    title="GLM-4",
    module="vllm.model_executor.models.glm4",
    cls="Glm4ForCausalLM",
    rotates_part=True,
)
