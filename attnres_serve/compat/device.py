"""Which device this runs on: the one place that answers, before vLLM is imported and after.

Ask for what is meant: what is no CPU need not be CUDA.
"""

import os
import sys
from enum import StrEnum

from attnres_serve.compat import versions


class Kind(StrEnum):
    """What vLLM runs on, by the name that a sentence gives it."""

    CPU = "CPU"
    CUDA = "CUDA"
    ROCM = "ROCm"
    XPU = "XPU"
    OTHER = "another device"  # that of a platform plugin, or one that cannot be told


def kind() -> Kind:
    """The kind of device: by vLLM's platform where that is imported, else by the installed package.

    Both agree, but for a platform plugin that stands aside: before it is loaded this is ``OTHER``.
    """
    return _of_platform() if "vllm.platforms" in sys.modules else _of_package()


def is_cpu() -> bool:
    """Whether vLLM runs on a CPU; where it does not, the device may be any other kind."""
    return kind() == Kind.CPU


def is_cuda() -> bool:
    """Whether vLLM runs on a CUDA device, which one of ROCm's is not."""
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


# How vLLM's builds for other devices than CUDA end their version; a build for none is "empty".
_SUFFIXES = {"rocm": Kind.ROCM, "xpu": Kind.XPU, "tpu": Kind.OTHER, "empty": Kind.OTHER}


def _of_package() -> Kind:
    """The kind that the installed vLLM is built for, as vLLM tells its CPU build."""
    from importlib.metadata import entry_points

    build = "".join(versions.installed())
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in build:
        return Kind.CPU
    if not build or entry_points(group="vllm.platform_plugins"):
        return Kind.OTHER
    return next((kind for suffix, kind in _SUFFIXES.items() if suffix in build), Kind.CUDA)
