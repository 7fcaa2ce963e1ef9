"""Prefix caching of hybrid models on CPU, which vLLM turns on by default for all of them.

vLLM 0.32 and 0.33 cannot run two kinds of them with it.  Mamba2 layers end by an IndexError at the
first prompt of more than one chunk: the scan on CPU returns the final state of a sequence, and the
cache asks for the state of every chunk.  Latent attention without AMX switches the caching off
again, too late: the size of a cached state is set by then, and vLLM refuses its own setting.
"""

from typing import Any

# Names by which config.json calls the hybrid models with Mamba2 layers.
MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "nemotron_h_puzzle", "zamba2")


def off_by_default() -> None:
    """Leave prefix caching off where it was not asked for and cannot run (idempotent).

    Call it on CPU, before an engine's arguments are completed.
    """
    from vllm.config import ModelConfig

    config: Any = ModelConfig
    supported = config.is_prefix_caching_supported
    if getattr(supported.fget, "knows_cpu", False):
        return

    def is_prefix_caching_supported(self) -> bool:
        return problem(self) is None and supported.fget(self)

    is_prefix_caching_supported.knows_cpu = True  # type: ignore[attr-defined]
    config.is_prefix_caching_supported = property(is_prefix_caching_supported)


def problem(model_config) -> str | None:
    """One sentence if a model cannot run with prefix caching on CPU, else None.

    Args:
        model_config: vLLM's.
    """
    import torch

    kind = None
    if getattr(model_config.hf_text_config, "model_type", None) in (*MAMBA2, "mamba2"):
        kind = "Mamba2 layers"
    elif _latent(model_config) and not torch.cpu._is_amx_tile_supported():
        kind = "latent attention and linear layers"
    if kind is None:
        return None
    return (
        f"--enable-prefix-caching is set, and vLLM cannot cache prefixes of models with {kind} on "
        "CPU; leave it out."
    )


def _latent(model_config) -> bool:
    return model_config.is_hybrid and model_config.use_mla
