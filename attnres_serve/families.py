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
        vllm_module, vllm_class: the class it is made from.
    """

    architecture: str
    vllm_module: str
    vllm_class: str


FAMILIES = {
    name: Family(f"AttnRes{cls}", f"vllm.model_executor.models.{name}", cls)
    for name, cls in (
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    )
}
BY_ARCHITECTURE = {family.architecture: name for name, family in FAMILIES.items()}

# Where the sites are in the modules of a decoder, and the names of their two parameters.
SITE_NORMS = ("input_layernorm", "post_attention_layernorm")
FINAL_NORM = "norm"
