"""Chunked prefill and prefix caching of latent attention on CPU.

vLLM 0.32 and 0.33: the platform switches both off for ``CPU_MLA``, which computes the context of a
prompt's later chunks all the same, as drafts need it.
"""

from typing import Any

from attnres_serve.families import BY_ARCHITECTURE


def keep_settings() -> None:
    """Leave both as they are in AttnRes models (idempotent)."""
    from vllm import _custom_ops
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    own = platform.check_and_update_config
    if not hasattr(_custom_ops, "gather_mla_context_cache_cpu"):  # of a vLLM that has no context
        return
    if getattr(own, "keeps_settings", False):
        return

    def check_and_update_config(cls, vllm_config) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunks, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        caches = cache.enable_prefix_caching
        own(vllm_config)
        if _is_ours(vllm_config.model_config):
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching = chunks, caches
            vllm_config.scheduler_config.max_num_batched_tokens = tokens

    check_and_update_config.keeps_settings = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


def _is_ours(model_config) -> bool:
    named = getattr(model_config and model_config.hf_config, "architectures", None) or ()
    return any(name in BY_ARCHITECTURE for name in named) and model_config.use_mla
