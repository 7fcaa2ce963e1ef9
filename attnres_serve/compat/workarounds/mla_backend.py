"""The backend of latent attention on CPU.

vLLM 0.32 and 0.33: ``CPU_MLA`` computes rows of one size, in blocks of 16 tokens alone, and a CPU
with AMX takes ``AMX_MLA``, whose kernels read rows as if they were of that size, and have weights
in bfloat16 alone.  For other rows and dtypes ``CPU_MLA`` is asked for, and
``model.latent_attention`` stands in its place.
"""

from attnres_serve.families import latent

OURS = "attnres_serve.model.latent_attention.Backend"


def compute_every_row() -> None:
    """Put our backend in the place of ``CPU_MLA`` (idempotent)."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    if hasattr(registry.AttentionBackendEnum, "CPU_MLA"):  # which older versions lack
        registry.register_backend(registry.AttentionBackendEnum.CPU_MLA, OURS)
        # vLLM repeats what it chose for an engine of this process before.
        selector._cached_get_attn_backend.cache_clear()


def uses_amx(model_config) -> bool:
    """Whether kernels for AMX compute a model's latent attention here.

    Args:
        model_config: vLLM's, of a model with latent attention.
    """
    import torch

    row = tuple(getattr(model_config.hf_text_config, key, None) for key in latent.ROW)
    fits = row == latent.COMPILED and model_config.dtype == torch.bfloat16
    return fits and torch.cpu._is_amx_tile_supported()


def ask_for_cpu_mla(vllm_config) -> None:
    """Ask for ``CPU_MLA`` where the kernels for AMX do not fit (idempotent)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if vllm_config.model_config.use_mla and not uses_amx(vllm_config.model_config):
        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
