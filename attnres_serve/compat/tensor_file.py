"""Sending tensors to other processes of this machine, in a file that they map.

Each file is in a folder that its owner locks.  A killed process loses its lock, so the next writer
removes its files.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnres_serve.errors import CheckpointError

_MEMORY = Path("/dev/shm")
_PREFIX = "attnres-serve-tensors-"


@contextmanager
def file_of(tensors: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The path of a file with tensors, in memory if there is room; removed after the context.

    Raises:
        CheckpointError: one is no tensor, or two have the same name.
    """
    from safetensors.torch import save_file

    by_name = plain(tensors)
    size = sum(tensor.nbytes for tensor in by_name.values())
    for place in _places():
        _remove_left(place)
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1.1 * size
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_MEMORY if has_room else None) as folder,
        _open(Path(folder)) as opened,
    ):
        with suppress(OSError):  # a file system without locks, where no files are removed
            fcntl.flock(opened, fcntl.LOCK_EX)
        path = Path(folder) / "tensors.safetensors"
        save_file(by_name, path)
        yield str(path)


def _places() -> list[Path]:
    """The folders for such files."""
    return [_MEMORY.resolve(), Path(tempfile.gettempdir()).resolve()]


def _remove_left(place: Path) -> None:
    """Remove the files of ended processes.

    An empty folder may be about to be locked, and stays.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError), _open(folder) as opened:  # locked, or another user's
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(folder.iterdir()):
                shutil.rmtree(folder)


@contextmanager
def _open(folder: Path) -> Iterator[int]:
    """The descriptor of a folder; links are refused."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield opened
    finally:
        os.close(opened)


def plain(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Contiguous tensors on the CPU, by name, for a file.

    Raises:
        CheckpointError: one is no tensor, or two have the same name.
    """
    by_name: dict[str, Any] = {}
    places: set[int] = set()
    for name, tensor in tensors:
        require_tensor(name, tensor)
        if name in by_name:
            raise CheckpointError(f"the tensor {name} comes twice; send each one once.")
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().nbytes() != copy.nbytes or copy.data_ptr() in places:
            copy = copy.clone()  # safetensors cannot write a view
        places.add(copy.data_ptr())
        by_name[name] = copy
    return by_name


def require_tensor(name: str, tensor: Any) -> None:
    """Raise CheckpointError if an object is no tensor."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{name!r} is a {type(tensor).__name__}; expected a tensor of torch's."
        )


def tensors_of(path: str) -> Iterator[tuple[str, Any]]:
    """Copies of a file's tensors by name, because its owner may write into it later.

    Raises:
        CheckpointError: it is no file in the folders of ``file_of``, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        resolved = Path(path).resolve(strict=True)
        _check_place(resolved)
        with safe_open(resolved, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield name, file.get_tensor(name).clone()
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as tensors ({error}).") from None


def _check_place(path: Path) -> None:
    """Raise OSError unless a path is a regular file in the folders for such files."""
    folders = _places()
    if not any(map(path.is_relative_to, folders)):
        raise OSError(f"expected a file below {folders[0]} or {folders[1]}")
    if not path.is_file():
        raise OSError("expected a regular file")
