"""Checkpoints with Attention Residuals that vLLM serves by itself, on a GPU."""

import importlib
import inspect
from importlib.util import find_spec

from attnres_serve.compat import host
from attnres_serve.errors import SettingError

# By our formats: vLLM's class of configurations, and the key by which it has Attention Residuals.
CONFIGS = {
    "kimi_linear": (
        "vllm.transformers_utils.configs.kimi_linear",
        "KimiLinearConfig",
        "attn_res_block_size",
    )
}

# And the module that has the class, where nothing but depth attention is in it.
MODULES = {"alice_ai": "alice_ai"}


def is_left_to_vllm(format_name: str, wanted: bool | None) -> bool:
    """Whether vLLM's own class serves a checkpoint.

    Args:
        format_name: its format.
        wanted: whether that was asked for; None where it was left open, which is yes on a GPU.

    Raises:
        SettingError: it was asked for where vLLM has no such class.
    """
    if wanted is False:
        return False
    if not host.on_cpu() and _has_class(format_name):
        return True
    if wanted:
        raise SettingError(
            f"attnres_native is 'on', and this vLLM has no Attention Residuals of its own for the "
            f"{format_name} format on this device; leave it out."
        )
    return False


def _has_class(format_name: str) -> bool:
    if format_name in CONFIGS:
        return _knows_key(*CONFIGS[format_name])
    return find_spec(f"vllm.model_executor.models.{MODULES[format_name]}") is not None


def _knows_key(module: str, name: str, key: str) -> bool:
    """Whether the class reads the key; an older one would serve standard residuals."""
    try:
        config = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    return key in inspect.signature(config.__init__).parameters
