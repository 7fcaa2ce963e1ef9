"""Models of vLLM's that its own registry makes for other devices than a CPU."""


def kimi_linear() -> None:
    """Let plain vLLM take its variant for ROCm, which any device can run, with our layer of KDA."""
    from vllm import ModelRegistry

    from attnres_serve.compat.bare_package import without_init
    from attnres_serve.compat.workarounds import hybrid_prefix_caching, mla_blocks
    from attnres_serve.model import linear_attention

    hybrid_prefix_caching.off_by_default()
    mla_blocks.accept_multiples()
    with without_init("vllm.models.kimi_k3"):
        from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
    linear_attention.replace_on_cpu()
    ModelRegistry.register_model("KimiLinearForCausalLM", KimiLinearForCausalLM)
