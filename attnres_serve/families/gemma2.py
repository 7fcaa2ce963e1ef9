"""Gemma 2: windows in every other layer, and norms also after the sublayers."""

from attnres_serve.families import hugging_face

FAMILY = hugging_face.family(
    "gemma2",
    title="Gemma 2",
    module="vllm.model_executor.models.gemma2",
    cls="Gemma2ForCausalLM",
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    activations=("gelu_pytorch_tanh",),
    only={"hidden_activation": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True,)},
    kinds=("sliding_attention", "full_attention"),
)
