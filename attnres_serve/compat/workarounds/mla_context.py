"""Chunked prefill and prefix caching of latent attention on CPU.

vLLM 0.32 and 0.33: the platform switches both off for ``CPU_MLA``, although it can compute the
context of a prompt's later chunks, which drafts need.
"""

from typing import Any

from attnres_serve.compat.patch import Patch
from attnres_serve.families import BY_ARCHITECTURE


def _keeping(original: Any) -> Any:
    """Keep both settings for AttnRes models."""

    def check_and_update_config(cls, vllm_config) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunks, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        caches = cache.enable_prefix_caching
        original(vllm_config)
        if _is_ours(vllm_config.model_config):
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching = chunks, caches
            vllm_config.scheduler_config.max_num_batched_tokens = tokens

    return classmethod(check_and_update_config)


def _is_ours(model_config) -> bool:
    named = getattr(model_config and model_config.hf_config, "architectures", None) or ()
    return any(name in BY_ARCHITECTURE for name in named) and model_config.use_mla


PATCH = Patch(
    targets=("vllm.platforms.cpu:CpuPlatform.check_and_update_config",),
    make=_keeping,
    why="chunked prefill was switched off",
    models="AttnRes models on CPU",
    first=(0, 29),  # 0.28 computes no context
    report="mla-hybrids-on-cpu",
)
