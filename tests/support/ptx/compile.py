"""PTX of the project's kernels, compiled in a child process: in this one Triton may be interpreted.

A kernel is compiled from what a launch on a GPU would specialise its code for: which tensors are
there, how their addresses are aligned, and which sizes are multiples of 16.  Nothing here imports
Triton before the child has forgotten the interpreter.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

ROOM = "attnres_serve.kernels.triton"


@dataclass(frozen=True)
class Pointer:
    """What Triton looks at in a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address, in the name that torch has for it."""
        return self.address


class Compiled(NamedTuple):
    """PTX, bytes of shared memory, and the names of the arguments that are parameters."""

    ptx: str
    shared: int
    parameters: list[str]


@cache
def compiled(module: str, name: str, arguments: tuple[tuple[str, Any], ...], arch: int) -> Compiled:
    """The code of a launch.

    Args:
        module, name: of the kernel.
        arguments: names and values, with ``Pointer`` for tensors.
        arch: compute capability times ten.
    """
    return _child().submit(_compile, module, name, dict(arguments), arch).result()


@cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_interpret_nothing)


def _interpret_nothing() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(module: str, name: str, arguments: dict[str, Any], arch: int) -> Compiled:
    import triton

    from attnres_serve.kernels.triton.common import launch_options
    from benchmarks.kernels.compile_ahead import specialise

    kernel = getattr(import_module(f"{ROOM}.{module}"), name)
    arguments = arguments | launch_options(early=arch >= 90)
    source, target, options = specialise(kernel, arguments, arch)
    done = triton.compile(source, target=target, options=options)
    parameters = [name for name, kind in source.signature.items() if kind != "constexpr"]
    return Compiled(done.asm["ptx"], done.metadata.shared, parameters)
