"""Backbone families as data: vLLM's classes whose decoder layers follow the residual convention.

In each of them ``hidden, residual = norm(hidden, residual)`` runs before attention, before the MLP
and once at the end; those norms become the sites.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One backbone.

    Attributes:
        architecture: our name for it in config.json.
        module, cls: the class it is made from.
        hf: the Hugging Face family whose config.json and tensor names it has.
        attention_gate: whether ``self_attn.attn_gate`` gates attention's output besides.
    """

    architecture: str
    module: str
    cls: str
    hf: str
    attention_gate: bool = False


FAMILIES = {
    name: Family(f"AttnRes{cls}", f"vllm.model_executor.models.{name}", cls, hf=name)
    for name, cls in (
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    )
}
FAMILIES["gated_llama"] = Family(
    "AttnResGatedLlamaForCausalLM",
    "attnres_serve.gated_attention",
    "GatedLlamaForCausalLM",
    hf="llama",
    attention_gate=True,
)
BY_ARCHITECTURE = {family.architecture: name for name, family in FAMILIES.items()}

# Where the sites are in the modules of a decoder, and the names of their two parameters.
SITE_NORMS = ("input_layernorm", "post_attention_layernorm")
FINAL_NORM = "norm"
