"""The backend of latent attention on CPU.

vLLM 0.32 and 0.33: ``CPU_MLA`` supports one row size, only in blocks of 16 tokens. A CPU with AMX
uses ``AMX_MLA``, whose kernels assume that size for all rows, and weights in bfloat16.  For other
rows and dtypes ``CPU_MLA`` is selected, and ``model.latent_attention`` replaces it.
"""

from attnres_serve.families import latent

OURS = "attnres_serve.model.latent_attention.Backend"


def compute_every_row() -> None:
    """Replace ``CPU_MLA`` by our backend (idempotent)."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    if hasattr(registry.AttentionBackendEnum, "CPU_MLA"):  # missing in older versions
        registry.register_backend(registry.AttentionBackendEnum.CPU_MLA, OURS)
        # vLLM caches its choice for an earlier engine of this process.
        selector._cached_get_attn_backend.cache_clear()


def uses_amx(model_config) -> bool:
    """Whether kernels for AMX compute a model's latent attention here.

    Args:
        model_config: vLLM's configuration of a model with latent attention.
    """
    import torch

    row = tuple(getattr(model_config.hf_text_config, key, None) for key in latent.ROW)
    fits = row == latent.COMPILED and model_config.dtype == torch.bfloat16
    return fits and torch.cpu._is_amx_tile_supported()


def ask_for_cpu_mla(vllm_config) -> None:
    """Select ``CPU_MLA`` for the model and its draft if the AMX kernels do not fit (idempotent).

    A draft takes its backend from ``speculative_config`` alone.  Backends that flags name are
    replaced, because no other computes such rows on a CPU.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if _lacks_kernels(vllm_config.model_config):
        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    drafts = vllm_config.speculative_config
    if drafts is not None and _lacks_kernels(drafts.draft_model_config):
        drafts.attention_backend = AttentionBackendEnum.CPU_MLA


def _lacks_kernels(model_config) -> bool:
    return model_config is not None and model_config.use_mla and not uses_amx(model_config)
