"""Files of a checkpoint folder: config.json and the headers of safetensors files."""

import json
import os
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints.other_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    of_an_adapter,
    other_kind,
    pickles,
)
from attnres_serve.checkpoints.tensors import Stored
from attnres_serve.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"  # the first bytes of a git-lfs pointer


@dataclass(frozen=True)
class Header(Stored):
    """The shape, dtype and file of one tensor.

    Attributes:
        file: its file.
    """

    file: Path

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bits_per_element(self) -> int:
        width = re.search(r"\d+", self.dtype)
        return int(width[0]) if width else 8  # BOOL

    @property
    def stored_bytes(self) -> int:
        return self.elements * self.bits_per_element // 8


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``folder``/config.json.

    Raises:
        CheckpointError: the folder or the file does not exist, or it holds no JSON object.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give the path of a checkpoint folder.")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors files."
            f"{other_kind([folder])}"
        )
    path = folder / "config.json"
    if not path.is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise CheckpointError(of_an_adapter(folder / ADAPTER_CONFIG, beside=False))
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a checkpoint folder."
            f"{other_kind(folder.iterdir())}"
        )
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it holds something else.
    """
    refuse_pointer(path)
    if path.read_bytes()[:3] == BOM_UTF8:
        raise CheckpointError(
            f"{path} begins with a byte order mark, which vLLM does not read; save it as UTF-8 "
            "without one."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    return content


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a git-lfs pointer, which `git clone` without git-lfs leaves."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        raise CheckpointError(
            f"{path} is a git-lfs pointer and not the file itself; run `git lfs pull` in its "
            "folder, or download the file."
        )


def read_headers(folder: Path) -> dict[str, Header]:
    """The headers of all tensors in the folder's safetensors files; no tensor is read.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or a shard missing.
    """
    headers: dict[str, Header] = {}
    for path in safetensors_files(folder):
        # Headers are the same for every framework, and numpy imports faster than torch.
        with opened(path, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name in headers:
                    raise CheckpointError(
                        f"the tensor {name} is in more than one file, {headers[name].file.name}"
                        f" and {path.name}; remove the one that is not of this model, or "
                        f"write {INDEX}, which names the file of every tensor."
                    )
                stored = tensors.get_slice(name)
                headers[name] = Header(tuple(stored.get_shape()), stored.get_dtype(), path)
    return headers


@contextmanager
def opened(path: Path, framework: str) -> Iterator[Any]:
    """An open safetensors file that gives tensors of a framework.

    Raises:
        CheckpointError: it is damaged, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    _refuse_dangling(path)
    refuse_pointer(path)
    try:
        with safe_open(path, framework=framework) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated ({error}); copy or download it again."
        ) from None


def safetensors_files(folder: Path) -> list[Path]:
    """The files of weights to serve.

    Raises:
        CheckpointError: there are none, or a shard is missing.
    """
    if (folder / INDEX).is_file():
        return indexed_files(folder / INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if adapter := next((path for path in files if path.name == ADAPTER), None):
        raise CheckpointError(of_an_adapter(adapter, beside=len(files) > 1))
    if files:
        return files
    if old := pickles(folder):
        raise CheckpointError(
            f"{folder} has its weights in {old[0].name}, a pickle, which can run code when it is "
            "read; make safetensors of it, reading tensors only, with `attnres-serve convert "
            f"{shlex.quote(str(folder))} DST`."
        )
    raise CheckpointError(
        f"{folder} has no *.safetensors file, so there are no weights to serve."
        f"{other_kind(folder.iterdir())}"
    )


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which does not exist; copy or download the "
            "file again."
        )


def indexed_files(index: Path) -> list[Path]:
    """The files that an index of shards names; all exist.

    Raises:
        CheckpointError: the index is damaged, or a file is missing.
    """
    names = sorted(set(weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        _refuse_dangling(index.parent / missing[0])
        others = sorted(set(index.parent.glob("*.safetensors")) - {index.parent / n for n in names})
        stale = f", or remove the index if {others[0].name} is the whole model" if others else ""
        raise CheckpointError(
            f"{index.parent} lacks the file {missing[0]}, which {index.name} names; copy or "
            f"download it again{stale}."
        )
    for name in names if index.name == INDEX else ():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names the file {name}, and vLLM reads *.safetensors files in the folder "
                "itself alone; move the file there under such a name, and name it so in the index."
            )
    return [index.parent / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor, by its name, from an index of shards.

    Raises:
        CheckpointError: the index is damaged.
    """
    refuse_pointer(index)
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in table.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is damaged; copy or download it again.") from None
