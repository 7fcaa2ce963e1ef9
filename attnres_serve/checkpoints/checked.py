"""Checks of a checkpoint without an engine, by config.json and its tensors' names and shapes."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints import hub, not_attnres
from attnres_serve.checkpoints.files import Header, read_config, read_headers
from attnres_serve.checkpoints.headers import check_headers
from attnres_serve.checkpoints.renaming.rename import CONVERT_COMMAND
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensor_names import tensor_names
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.resolve import resolve


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint.

    Attributes:
        config: the content of config.json.
        parsed: its parsed form; None if this is no AttnRes checkpoint.
        headers: its tensors by the checkpoint's names; empty if it is no AttnRes checkpoint, or a
            model id whose headers are not available.
        index: the same tensors by house names; None without headers.
    """

    config: dict[str, Any]
    parsed: ParsedConfig | None
    headers: Mapping[str, Header]
    index: TensorIndex | None = None

    def translated(self, name: str) -> ParsedConfig:
        """The parsed config.json of an AttnRes checkpoint.

        Args:
            name: the checkpoint's name, for messages.

        Raises:
            CheckpointError: it is no AttnRes checkpoint.
        """
        if self.parsed is None:
            raise not_attnres.of_checkpoint(name, self.config, conversion(name))
        return self.parsed


def conversion(name: str) -> str:
    """The command that converts a checkpoint, to which options can be added."""
    return CONVERT_COMMAND.replace("SRC", shlex.quote(name))


def translate(
    config: dict[str, Any],
    trusts_code: bool,
    name: str | Path,
    revision: str | None = None,
) -> ParsedConfig | None:
    """``resolve`` with the tensor names of the checkpoint ``name``."""
    return resolve(config, trusts_code, lambda: tensor_names(name, revision))


def check_content(
    config: dict[str, Any],
    headers: Callable[[], Mapping[str, Header]],
    command: str = CONVERT_COMMAND,
) -> Checkpoint:
    """Validate a checkpoint from its config.json and headers.

    Args:
        config: the content of config.json.
        headers: gives its tensors; called once, and only if this may be an AttnRes checkpoint.
        command: a ``convert`` command that could rename them.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    headers = cache(headers)
    parsed = resolve(config, names=headers)
    if parsed is None:
        return Checkpoint(config, None, {})
    return Checkpoint(config, parsed, headers(), check_headers(parsed, headers(), command))


def check_folder(folder: Path) -> Checkpoint:
    """Validate a checkpoint folder by its config.json and the headers of its safetensors files.

    Tensors are not read, except a stored head that is tied, and biases that a quantisation added.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    command = conversion(str(folder))
    checkpoint = check_content(read_config(folder), lambda: read_headers(folder), command)
    if checkpoint.index is not None:
        _check_values(checkpoint.index, checkpoint.headers)
    return checkpoint


def check_hub(name: str, revision: str | None = None) -> Checkpoint:
    """Validate a Hugging Face model id, as far as the headers of its files are available.

    Raises:
        CheckpointError: for anything that cannot be served exactly, or a model that does not exist.
    """
    config = hub.read_config(name, revision)
    parsed = translate(config, False, name, revision)
    headers = None if parsed is None else hub.read_shared_headers(name, revision)
    if parsed is None or headers is None:
        return Checkpoint(config, parsed, {})
    return Checkpoint(config, parsed, headers, check_headers(parsed, headers, conversion(name)))


def check_model(name: str, revision: str | None = None, has_weights: bool = True) -> Checkpoint:
    """Validate a folder, or a Hugging Face model id, that must be an AttnRes checkpoint.

    Args:
        name: the folder or the model id.
        revision: branch, tag or commit of a model id.
        has_weights: whether its weights will be read; otherwise only config.json is checked.

    Raises:
        CheckpointError: it cannot be served as its config.json describes.
    """
    folder = hub.local_path(name)
    if not has_weights:
        config = hub.read_config(name, revision) if folder is None else read_config(folder)
        checkpoint = Checkpoint(config, translate(config, False, folder or name, revision), {})
    elif folder is None:
        checkpoint = check_hub(name, revision)
    else:
        checkpoint = check_folder(folder)
    checkpoint.translated(name)
    return checkpoint


def _check_values(index: TensorIndex, headers: Mapping[str, Header]) -> None:
    """Check the tensors whose values matter, in addition to their headers.

    Raises:
        CheckpointError: a tied head has other values than the embedding, or a bias that the model
            does not have is not zero.
    """
    for name, stored_name in index.stored_names.items():
        if stored_name in headers and index.has_telling_values(name):
            from attnres_serve.checkpoints.read import read_tensor  # imports torch

            index.check_values(name, read_tensor(headers, stored_name))
