"""Writing safetensors files one tensor at a time; ``save_file`` would hold all of them."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from attnres_serve.checkpoints.files import Header

CHUNK = 1 << 24  # bytes between two calls of ``progress``


class SafetensorsFile:
    """A new file for known tensors, which are written in any order.

    Args:
        path: of the file, which must not exist.
        headers: its tensors.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, headers: Mapping[str, Header]) -> None:
        # Wider types first, like safetensors, so that every tensor is aligned.
        order = sorted(headers, key=lambda name: -headers[name].bits_per_element)
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for name in order:
            header = headers[name]
            self._starts[name], end = end, end + header.stored_bytes
            table[name] = {
                "dtype": header.dtype,
                "shape": list(header.shape),
                "data_offsets": [self._starts[name], end],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._data = 8 + len(text)

    def write(self, name: str, tensor: Tensor, progress: Callable[[int], object]) -> None:
        """Write one tensor, and report written bytes to ``progress``.

        Raises:
            KeyError: the file has no such tensor, or has it already.
        """
        self._file.seek(self._data + self._starts.pop(name))
        flat = tensor.detach().contiguous().reshape(-1)
        content = memoryview(flat.view(torch.uint8).numpy())
        for start in range(0, len(content), CHUNK):
            progress(self._file.write(content[start : start + CHUNK]))

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file as file:
            if error is None:
                assert not self._starts, f"never written: {sorted(self._starts)}"
                file.flush()
                os.fsync(file.fileno())


def shards(headers: Mapping[str, Header]) -> dict[str, dict[str, Header]]:
    """The tensors of every new file, one per source file, under Hugging Face's file names."""
    files = list(dict.fromkeys(header.file for header in headers.values()))
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    return {
        shard: {name: header for name, header in headers.items() if header.file == file}
        for shard, file in zip(names, files, strict=True)
    }


def write_shards(
    folder: Path,
    planned: Mapping[str, Mapping[str, Header]],
    tensors: Iterator[tuple[str, Tensor]],
    progress: Callable[[int], object],
) -> None:
    """Write what ``shards`` planned into ``folder``, from tensors in the same order.

    Raises:
        OSError: it cannot be written.
    """
    for shard, headers in planned.items():
        with SafetensorsFile(folder / shard, headers) as file:
            for name, tensor in islice(tensors, len(headers)):
                file.write(name, tensor, progress)
