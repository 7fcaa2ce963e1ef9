"""Gemma 3: windows in most layers, which have another rotary embedding."""

from attnres_serve.families import hugging_face, rotary

KINDS = ("sliding_attention", "full_attention")

FAMILY = hugging_face.family(
    "gemma3_text",
    title="Gemma 3",
    module="vllm.model_executor.models.gemma3",
    cls="Gemma3ForCausalLM",
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    also=("rope_local_base_freq", "sliding_window_pattern"),
    activations=("gelu_pytorch_tanh",),
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        # Neither class caps attention scores, even if the key says so.
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    kinds=KINDS,
    rope=rotary.by_kinds(*KINDS),
)
