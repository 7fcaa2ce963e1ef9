"""Names of a checkpoint's tensors, before its headers are checked."""

from collections.abc import Collection
from pathlib import Path

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.files import INDEX, read_headers, weight_map
from attnres_serve.checkpoints.other_files import pickles
from attnres_serve.errors import CheckpointError


def tensor_names(name: str | Path, revision: str | None = None) -> Collection[str] | None:
    """Names of a checkpoint's tensors; None if its safetensors files are not available.

    Args:
        name: a folder, or a Hugging Face model id.
        revision: branch, tag or commit of a model id.

    Raises:
        CheckpointError: a file of a local folder is damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        return hub.read_shared_headers(str(name), revision)
    index = folder / INDEX
    if index.is_file():  # enough to tell names, even if the files themselves are elsewhere
        return weight_map(index)
    return read_headers(folder) if any(folder.glob("*.safetensors")) else None


def names_of_any(name: str) -> Collection[str]:
    """Names of a checkpoint's tensors, including pickles; empty if they are not available."""
    try:
        folder = hub.local_path(name)
        if folder is None or not folder.is_dir() or not pickles(folder):
            return tensor_names(folder or name) or ()
        from attnres_serve.checkpoints import read  # imports torch

        return [stored_name for path in read.files(folder) for stored_name, _ in read.tensors(path)]
    except CheckpointError:  # config.json alone tells that it is refused
        return ()
