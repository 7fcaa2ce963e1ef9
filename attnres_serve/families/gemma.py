"""Gemma: norms whose weight w stands for 1 + w."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "gemma",
    title="Gemma",
    module="vllm.model_executor.models.gemma",
    cls="GemmaForCausalLM",
    activations=("gelu_pytorch_tanh",),
    only={"hidden_activation": (None, "gelu_pytorch_tanh"), "tie_word_embeddings": (True,)},
)
