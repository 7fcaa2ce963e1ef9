"""Models of vLLM's that its own registry makes for other devices than a CPU."""

from attnres_serve.compat.bare_package import without_init
from attnres_serve.compat.workarounds import mla_backend, rotary
from attnres_serve.model import linear_attention


def _hybrid() -> None:
    mla_backend.compute_every_row()
    rotary.PATCH.apply()


def kimi_linear() -> None:
    """Let plain vLLM take its variant for ROCm, which any device can run, with our layer of KDA."""
    from vllm import ModelRegistry

    _hybrid()
    with without_init("vllm.models.kimi_k3"):
        from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
    linear_attention.replace_for_cpu()
    ModelRegistry.register_model("KimiLinearForCausalLM", KimiLinearForCausalLM)


def bailing_hybrid() -> None:
    """Let plain vLLM read its config.json without code of a repository, with our linear layer."""
    from transformers import AutoConfig
    from vllm.model_executor.models import bailing_moe_linear  # noqa: F401  its layer is replaced

    from attnres_serve.model.bailing import BailingHybridConfig

    _hybrid()
    AutoConfig.register("bailing_hybrid", BailingHybridConfig, exist_ok=True)
    linear_attention.replace_for_cpu()


def qwen3_next() -> None:
    """Let plain vLLM take our layer of Gated DeltaNet: its own knows bfloat16 and two sizes."""
    from vllm.model_executor.models import qwen3_next  # noqa: F401  its layer is replaced

    linear_attention.replace_for_cpu()


def bailing_moe() -> None:
    """Let plain vLLM read its config.json without code of a repository."""
    from transformers import AutoConfig

    from attnres_serve.model.bailing import BailingMoeConfig

    AutoConfig.register("bailing_moe", BailingMoeConfig, exist_ok=True)
