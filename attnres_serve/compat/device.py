"""The device of this process, before and after the import of vLLM: the only place that decides.

Check for the device that you mean: a device that is no CPU need not be CUDA.
"""

import os
import sys
from enum import StrEnum

from attnres_serve.compat import versions


class Kind(StrEnum):
    """Devices of vLLM, by their names in sentences."""

    CPU = "CPU"
    CUDA = "CUDA"
    ROCM = "ROCm"
    XPU = "XPU"
    OTHER = "another device"  # that of a platform plugin, or an unknown one


def kind() -> Kind:
    """The kind of device: by vLLM's platform if imported, else by the installed package.

    Both agree, except for a platform plugin that does not apply: before it is loaded this is
    ``OTHER``.
    """
    return _of_platform() if "vllm.platforms" in sys.modules else _of_package()


def is_cpu() -> bool:
    """Whether vLLM runs on a CPU; otherwise the device may be any other kind."""
    return kind() == Kind.CPU


def is_cuda() -> bool:
    """Whether vLLM runs on a CUDA device; ROCm devices are none."""
    return kind() == Kind.CUDA


def capability() -> tuple[int, int] | None:
    """The compute capability of this worker's CUDA device; None on every other kind.

    Raises:
        RuntimeError: the device cannot be used.
    """
    if not is_cuda():
        return None
    import torch

    version: tuple[int, int] = torch.cuda.get_device_capability()
    return version


def _of_platform() -> Kind:
    from vllm.platforms import current_platform as platform

    checks = {
        Kind.CPU: platform.is_cpu,
        Kind.CUDA: platform.is_cuda,
        Kind.ROCM: platform.is_rocm,
        Kind.XPU: platform.is_xpu,
    }
    return next((kind for kind, answer in checks.items() if answer()), Kind.OTHER)


# Version suffixes of vLLM's builds for other devices than CUDA; "empty" is for none.
_SUFFIXES = {"rocm": Kind.ROCM, "xpu": Kind.XPU, "tpu": Kind.OTHER, "empty": Kind.OTHER}


def _of_package() -> Kind:
    """The kind of device of the installed vLLM's build, by vLLM's rule."""
    from importlib.metadata import entry_points

    build = "".join(versions.installed())
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in build:
        return Kind.CPU
    if not build or entry_points(group="vllm.platform_plugins"):
        return Kind.OTHER
    return next((kind for suffix, kind in _SUFFIXES.items() if suffix in build), Kind.CUDA)
