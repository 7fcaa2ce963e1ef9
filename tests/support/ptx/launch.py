"""Launches of the project's kernels, whose compiled code is executed program by program."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from attnres_serve.kernels.triton import common, score_group
from ptx.block import Block, Code
from ptx.compile import ROOM, Pointer, compiled
from ptx.memory import Tensors
from ptx.parse import parse

# Module, and the kernel that it defines and launches.
KERNELS = (
    ("single_pass", "site_kernel"),
    ("phase_1", "phase_1_kernel"),
    ("score_group", "score_group_kernel"),
    ("mix_group", "weigh_group_kernel"),
    ("mix_group", "mix_group_kernel"),
)


class Moved(NamedTuple):
    """Bytes of global memory that a launch read and wrote, each address once.

    What a launch read after it had written it is not counted as read.
    """

    read: int
    written: int


class Emulator:
    """Stands for the project's kernels, whose functions then take tensors of the host.

    Attributes:
        arch: compute capability times ten, of what is compiled.
        change: of the PTX before it is executed, to plant a fault.
        moved: what each launch read and wrote, in order.
    """

    def __init__(self, arch: int = 90) -> None:
        self.arch = arch
        self.change: Callable[[str], str] = str
        self.moved: list[Moved] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of all kernels while a test runs."""
        monkeypatch.setattr(common, "INTERPRETED", True)  # tensors of the host are let through
        # Where a table depends on it, the config is that of what is emulated.
        monkeypatch.setattr(score_group, "capability", lambda device: divmod(self.arch, 10))
        for module, name in KERNELS:
            stand_in = _Kernel(self, module, name)
            monkeypatch.setattr(import_module(f"{ROOM}.{module}"), name, stand_in)

    def launch(
        self, module: str, name: str, arguments: dict[str, Any], grid: tuple[int, ...]
    ) -> None:
        """Execute every program of a launch; the tensors hold what it wrote.

        Raises:
            PtxError: on the first fault of the compiled code.
        """
        given = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        tensors = Tensors(list(given.values()))
        address = {key: tensors.address(value) for key, value in given.items()}
        known = {key: Pointer(given[key].dtype, at % 16) for key, at in address.items()}
        code = compiled(module, name, tuple((arguments | known).items()), self.arch)
        if not all(grid):  # it was only to be compiled
            return
        values = [(arguments | address)[key] for key in code.parameters]
        ptx = self.change(code.ptx)
        self.moved.append(execute(ptx, values, grid, tensors, code.shared))
        tensors.write_back()


class _Kernel(NamedTuple):
    """``kernel[grid](**arguments)``, as Triton spells a launch."""

    emulator: Emulator
    module: str
    name: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:  # type: ignore[override]
        return lambda **arguments: self.emulator.launch(self.module, self.name, arguments, grid)


def execute(
    ptx: str, values: list[int | float], grid: tuple[int, ...], tensors: Tensors, shared: int
) -> Moved:
    """Execute a kernel; parameters behind those given are zero, as Triton's scratch pointers."""
    code = _code(ptx)
    names = code.program.parameters
    given = [*map(_bits, values), *[0] * (len(names) - len(values))]
    sizes = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for z, y, x in product(*map(range, reversed(sizes))):
            parameters = dict(zip(names, given, strict=True))
            Block(code, parameters, (x, y, z), sizes, tensors.memory, shared).run()
    return Moved(int(tensors.memory.read.sum()), int(tensors.memory.written.sum()))


@cache
def _code(ptx: str) -> Code:
    return Code(parse(ptx))


def _bits(value: int | float) -> int:
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)
