"""docs/build/upstream/mla-hybrids-on-cpu.md"""

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.compat.faults.hybrid_prefix_caching import Model


def fault() -> bool:
    """Chunked prefill is switched off beside ``CPU_MLA``, which computes a chunk's context."""
    config = VllmConfig()
    model = Model("AttnResKimiLinearForCausalLM", mla=True)
    model.max_model_len = 64
    config.model_config = model
    config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    config.scheduler_config.enable_chunked_prefill = True
    CpuPlatform.check_and_update_config(config)
    return not config.scheduler_config.enable_chunked_prefill
