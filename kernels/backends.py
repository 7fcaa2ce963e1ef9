"""Backends by name.  Algorithm and backend are separate choices."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attnres_serve.kernels.interface import Backend, BankBackend, TensorBackend


def _cpp() -> "BankBackend":
    from attnres_serve.kernels.cpp import backend

    return backend


def _torch() -> "TensorBackend":
    from attnres_serve.kernels.torch import backend

    return backend


def _triton() -> "BankBackend":
    from attnres_serve.kernels.triton import backend

    return backend


_MODULES: dict[str, Callable[[], "Backend"]] = {"cpp": _cpp, "torch": _torch, "triton": _triton}
BACKENDS = tuple(_MODULES)


def load(name: str, dtype: "torch.dtype | None" = None) -> "Backend":
    """The backend of that name, ready to run.

    Args:
        name: one of ``BACKENDS``.
        dtype: of the activations; None for any that it takes.

    Raises:
        BackendError: it cannot run on this machine.
        KeyError: there is none of that name.
    """
    backend = _MODULES[name]()
    backend.prepare(dtype)
    return backend
