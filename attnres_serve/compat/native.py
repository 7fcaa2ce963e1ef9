"""AttnRes checkpoints for which vLLM has a class, on CUDA and ROCm."""

import importlib
import inspect
from importlib.util import find_spec
from typing import NamedTuple

from attnres_serve.compat import device
from attnres_serve.errors import SettingError

MODELS = "vllm.model_executor.models"  # newer versions may have further modules here


class Native(NamedTuple):
    """The evidence that vLLM has a class for a format.

    Attributes:
        module: a vLLM module; its existence is enough without the other fields.
        config_class: its class of configurations.
        key: a key of config.json that the class reads only if it has Attention Residuals.
    """

    module: str
    config_class: str = ""
    key: str = ""


def is_left_to_vllm(format_name: str, native: Native, choice: str) -> bool:
    """Whether vLLM's class serves a checkpoint.

    Args:
        format_name: its format.
        native: the evidence of vLLM's class.
        choice: ``on``, ``off``, or ``auto``, which means on if vLLM has a class for the device.

    Raises:
        SettingError: it is ``on``, and vLLM has no such class.
    """
    if choice == "off":
        return False
    if _is_for_this_device() and _has_class(native):
        return True
    if choice == "on":
        raise SettingError(
            f"attnres_native is 'on', and this vLLM has no Attention Residuals of its own for the "
            f"{format_name} format on this device; leave it out."
        )
    return False


def served_by(native: Native) -> str:
    """Whose class serves a checkpoint on this device by default, and why."""
    if not _is_for_this_device():
        return "this project's class, because vLLM's own needs CUDA or ROCm"
    if _has_class(native):
        return (
            f"vLLM's own class, because this is {device.kind()}; --attnres-native off takes this "
            "project's"
        )
    return "this project's class, because this vLLM has none of its own"


def _is_for_this_device() -> bool:
    """Whether vLLM's classes with Attention Residuals support this device."""
    return device.kind() in (device.Kind.CUDA, device.Kind.ROCM)


def _has_class(native: Native) -> bool:
    """Whether vLLM has the class; an older one ignores the key and has standard residuals."""
    if not native.config_class:
        return find_spec(native.module) is not None
    try:
        config = getattr(importlib.import_module(native.module), native.config_class)
    except (ImportError, AttributeError):
        return False
    return native.key in inspect.signature(config.__init__).parameters
