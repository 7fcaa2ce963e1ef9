"""Memory that has rows of tensors and nothing between them: bounds, alignment, bytes moved.

Only the rows are stored, so a tensor may reach over any distance, and an access between two rows is
as wrong as one behind the last.
"""

import numpy as np
import torch
from torch import Tensor

from ptx.errors import MisalignedError, OutOfBoundsError, RaceError
from ptx.races import Races

REGION = 1 << 40  # bytes between the starts of two tensors: none is reached from another


class Memory:
    """Bytes at 64-bit addresses, in runs that are in bounds.

    Attributes:
        data: the bytes of all runs, one after the other.
        read: which of them a launch read before it wrote them.
        written: which it wrote.
        by_warp: races between warps of a program; epochs are its barriers.
        by_program: races between programs of a launch, which have one epoch.
    """

    def __init__(self, starts: np.ndarray, data: list[np.ndarray]) -> None:
        """Runs that begin at the addresses ``starts``, which ascend."""
        self._starts = starts
        self._sizes = np.array([run.size for run in data], np.int64)
        self._at = np.cumsum(self._sizes) - self._sizes  # where a run lies in the data
        self.data = np.concatenate(data)
        self.read = np.zeros(self.data.size, bool)
        self.written = np.zeros(self.data.size, bool)
        self.by_warp = Races(self.data.size, "warps")
        self.by_program = Races(self.data.size, "programs")

    def load(
        self, address: np.ndarray, size: int, warp: np.ndarray, program: np.ndarray
    ) -> np.ndarray:
        """Bytes ``[threads, size]`` at one address a thread.

        Raises:
            OutOfBoundsError, MisalignedError, RaceError: as their names say.
        """
        at = self._bytes_at(address, size)
        for races, agent in ((self.by_warp, warp), (self.by_program, program)):
            races.read(at.ravel(), np.repeat(agent, size))
        self.read[at] |= ~self.written[at]
        return self.data[at]

    def store(
        self, address: np.ndarray, values: np.ndarray, warp: np.ndarray, program: np.ndarray
    ) -> None:
        """Write bytes ``[threads, size]`` at one address a thread; raises what ``load`` does."""
        size = values.shape[1]
        at = self._bytes_at(address, size)
        changes = (self.data[at] != values).ravel()
        for races, agent in ((self.by_warp, warp), (self.by_program, program)):
            races.write(at.ravel(), np.repeat(agent, size), changes)
        self.written[at] = True
        self.data[at] = values
        if (self.data[at] != values).any():
            raise RaceError("threads store different values at one address at once")

    def runs(self) -> list[np.ndarray]:
        """What the runs hold, in order."""
        return np.split(self.data, self._at[1:])

    def _bytes_at(self, address: np.ndarray, size: int) -> np.ndarray:
        address = address.astype(np.int64)
        if (address % size).any():
            wrong = int(address[address % size != 0][0])
            raise MisalignedError(f"{size} bytes at {wrong:#x}")
        run = np.searchsorted(self._starts, address, side="right") - 1
        within = address - self._starts[run]
        outside = (run < 0) | (within + size > self._sizes[run])
        if outside.any():
            raise OutOfBoundsError(f"{size} bytes at {int(address[outside][0]):#x}")
        return (self._at[run] + within)[:, None] + np.arange(size)


def shared_memory(size: int) -> Memory:
    """The shared memory of a program; what was never written is NaN in every float format."""
    return Memory(np.zeros(1, np.int64), [np.full(size, 0xFF, np.uint8)])


class Tensors:
    """Tensors of a launch, whose rows are copied to a memory and back.

    Raises:
        ValueError: if two share bytes.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        self._region = {data: REGION * (1 + i) for i, data in enumerate(dict.fromkeys(storages))}
        starts = np.concatenate([self.address(each) + _offsets(each) for each in tensors])
        rows = [row for each in tensors for row in _rows(each)]
        self._order = np.argsort(starts)
        starts, rows = starts[self._order], [rows[i] for i in self._order]
        if (starts[:-1] + [row.size for row in rows[:-1]] > starts[1:]).any():
            raise ValueError("two tensors of a launch share bytes")
        self.memory = Memory(starts, rows)

    def address(self, tensor: Tensor) -> int:
        """Of a tensor's first element; that of a storage is a multiple of ``REGION``."""
        within = tensor.storage_offset() * tensor.element_size()
        return self._region[tensor.untyped_storage().data_ptr()] + within

    def write_back(self) -> None:
        """Copy what the memory holds to the tensors."""
        rows: list[np.ndarray] = [np.empty(0)] * len(self._order)
        for run, data in zip(self._order, self.memory.runs(), strict=True):
            rows[run] = data
        for tensor in self._tensors:
            count = len(_offsets(tensor))
            values = torch.from_numpy(np.concatenate(rows[:count])).view(tensor.dtype)
            tensor.copy_(values.view(tensor.shape))
            rows = rows[count:]


def _offsets(tensor: Tensor) -> np.ndarray:
    """Bytes from a tensor's first element to each of its rows, or elements if these are apart."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if strides[-1] == 1:
        shape[-1] = 1
    grids = np.meshgrid(*map(np.arange, shape), indexing="ij")
    offsets = sum(grid * stride for grid, stride in zip(grids, strides, strict=True))
    return np.asarray(offsets).ravel() * tensor.element_size()


def _rows(tensor: Tensor) -> list[np.ndarray]:
    """Bytes of what ``_offsets`` points to, in that order."""
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return np.split(values, len(_offsets(tensor)))
