"""Checkpoints with Attention Residuals that vLLM serves by itself, on CUDA and on ROCm."""

import importlib
import inspect
from importlib.util import find_spec
from typing import NamedTuple

from attnres_serve.compat import device
from attnres_serve.errors import SettingError

MODELS = "vllm.model_executor.models"  # where newer versions may have modules that older ones lack


class Native(NamedTuple):
    """What shows that a vLLM serves a format by itself.

    Attributes:
        module: a module of vLLM's; that it is there is enough if nothing else is named.
        config_class: its class of configurations.
        key: of config.json, which that class reads only if it has Attention Residuals.
    """

    module: str
    config_class: str = ""
    key: str = ""


def is_left_to_vllm(format_name: str, native: Native, choice: str) -> bool:
    """Whether vLLM's own class serves a checkpoint.

    Args:
        format_name: its format.
        native: what shows that vLLM serves it.
        choice: ``on``, ``off``, or ``auto``, which is on where vLLM has a class for the device.

    Raises:
        SettingError: it was asked for where vLLM has no such class.
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
    """Whose class serves a checkpoint on this device if nothing is asked for, and why."""
    if not _is_for_this_device():
        return "this project's class, because vLLM's own needs CUDA or ROCm"
    if _has_class(native):
        return (
            f"vLLM's own class, because this is {device.kind()}; --attnres-native off takes this "
            "project's"
        )
    return "this project's class, because this vLLM has none of its own"


def _is_for_this_device() -> bool:
    """Whether vLLM's classes with Attention Residuals have a variant for it."""
    return device.kind() in (device.Kind.CUDA, device.Kind.ROCM)


def _has_class(native: Native) -> bool:
    """Whether vLLM has it; an older class does not read the key and has standard residuals."""
    if not native.config_class:
        return find_spec(native.module) is not None
    try:
        config = getattr(importlib.import_module(native.module), native.config_class)
    except (ImportError, AttributeError):
        return False
    return native.key in inspect.signature(config.__init__).parameters
