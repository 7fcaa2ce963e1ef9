"""Backends by name.  Algorithm and backend are separate choices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnres_serve.kernels.interface import Backend, BankBackend, TensorBackend

BACKENDS = ("cpp", "torch", "triton")


def load(name: str) -> "Backend":
    """The backend of that name, ready to run.

    Args:
        name: one of ``BACKENDS``.

    Raises:
        BackendError: it cannot run on this machine.
    """
    backend = _separate() if name == "torch" else _in_place(name)
    backend.prepare()
    return backend


def _separate() -> "TensorBackend":
    from attnres_serve.kernels.torch import backend

    return backend


def _in_place(name: str) -> "BankBackend":
    if name == "cpp":
        from attnres_serve.kernels.cpp import backend as cpp

        return cpp
    from attnres_serve.kernels.triton import backend as triton

    return triton
