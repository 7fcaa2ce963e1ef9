"""Gemma: norms that multiply by 1 + weight."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "gemma",
    title="Gemma",
    module="vllm.model_executor.models.gemma",
    cls="GemmaForCausalLM",
    activations=("gelu_pytorch_tanh",),
    only={"hidden_activation": (None, "gelu_pytorch_tanh"), "tie_word_embeddings": (True,)},
)
