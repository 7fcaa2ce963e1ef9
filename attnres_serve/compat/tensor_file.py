"""Tensors that go to other processes of this machine, in a file that is mapped there.

A file is in a folder that its owner locks.  The lock of a process that was killed is gone, so
whoever writes next removes what it left.
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
    """The path of a file that holds tensors, in memory if that has room, as long as it is used.

    Raises:
        CheckpointError: one is no tensor, or has the name of another.
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
        with suppress(OSError):  # of a file system without locks; nobody removes anything there
            fcntl.flock(opened, fcntl.LOCK_EX)
        path = Path(folder) / "tensors.safetensors"
        save_file(by_name, path)
        yield str(path)


def _places() -> list[Path]:
    """The folders in which files may be."""
    return [_MEMORY.resolve(), Path(tempfile.gettempdir()).resolve()]


def _remove_left(place: Path) -> None:
    """Remove the files of processes that are gone.

    An empty folder may be one that is about to be locked.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError), _open(folder) as opened:  # others have it locked, or own it
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(folder.iterdir()):
                shutil.rmtree(folder)


@contextmanager
def _open(folder: Path) -> Iterator[int]:
    """The descriptor of a folder, which no link leads to."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield opened
    finally:
        os.close(opened)


def plain(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Tensors as a file can hold them, by name.

    Raises:
        CheckpointError: one is no tensor, or has the name of another.
    """
    by_name: dict[str, Any] = {}
    places: set[int] = set()
    for name, tensor in tensors:
        require_tensor(name, tensor)
        if name in by_name:
            raise CheckpointError(f"the tensor {name} comes twice; send each one once.")
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().nbytes() != copy.nbytes or copy.data_ptr() in places:
            copy = copy.clone()  # a part of another cannot be written
        places.add(copy.data_ptr())
        by_name[name] = copy
    return by_name


def require_tensor(name: str, tensor: Any) -> None:
    """Raise CheckpointError for what is no tensor."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{name!r} is a {type(tensor).__name__}; expected a tensor of torch's."
        )


def tensors_of(path: str) -> Iterator[tuple[str, Any]]:
    """Copies of the tensors of a file by name; its owner may write into it later.

    Raises:
        CheckpointError: there is no such file where ``file_of`` puts one, or it is damaged.
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
    """Raise OSError unless a path is of a regular file below the folders for such files."""
    folders = _places()
    if not any(map(path.is_relative_to, folders)):
        raise OSError(f"expected a file below {folders[0]} or {folders[1]}")
    if not path.is_file():
        raise OSError("expected a regular file")
