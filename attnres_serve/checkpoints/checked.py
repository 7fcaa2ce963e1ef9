"""Checks of a checkpoint without an engine, by config.json and its tensors' names and shapes."""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve import formats
from attnres_serve.checkpoints import hub, plain_config
from attnres_serve.checkpoints.files import (
    INDEX,
    Header,
    opened,
    pickles,
    read_config,
    read_headers,
    weight_map,
)
from attnres_serve.checkpoints.headers import check_headers
from attnres_serve.checkpoints.renaming.rename import CONVERT_COMMAND
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import EMBEDDING, HEAD
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.resolve import resolve

if TYPE_CHECKING:
    from torch import Tensor


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
            is_known = str(self.config.get("model_type")) in FAMILIES
            names = _names_of_any(name) if is_known else ()
            raise no_attnres(name, self.config, names, conversion(name))
        return self.parsed

    def has_table(self, leaf: str, table: "Tensor") -> bool:
        """Whether a table [tokens, hidden] equals that of a leaf, in the less precise dtype."""
        import torch

        if self.index is None:  # its weights are not here
            return True
        names = self.index.stored_names
        stored_name = names.get(HEAD if leaf == "lm_head" else EMBEDDING) or names.get(EMBEDDING)
        if stored_name is None or stored_name not in self.headers:
            return False
        stored = read_tensor(self.headers, stored_name)
        if stored.shape != table.shape or not stored.is_floating_point():
            return False
        common = min(stored.dtype, table.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        return bool(torch.equal(stored.to(common), table.to(common)))


def no_attnres(
    name: str, config: dict[str, Any], names: Collection[str], command: str
) -> CheckpointError:
    """The error for a checkpoint that is not recognised as one with AttnRes.

    Args:
        name: the checkpoint's name, for messages.
        config: the content of its config.json.
        names: of its tensors, as far as they are known.
        command: of ``convert``, to which options can be added.
    """
    if queries := plain_config.queries(config, names):
        return CheckpointError(queries.advice(name, command))
    message = (
        f"{name} is not an AttnRes checkpoint that can be served: found model_type "
        f"{config.get('model_type')!r} and architectures "
        f"{config.get('architectures')!r}; {formats.SUPPORTED}."
    )
    if str(config.get("model_type")) in FAMILIES:
        way = f"{command} --add-zero-queries --block-size 4"
        message += f" Make an AttnRes model of it, with queries to train, by `{way}`."
    return CheckpointError(message)


def _names_of_any(name: str) -> Collection[str]:
    """Names of a checkpoint's tensors, including pickles; empty if they are not available."""
    try:
        folder = hub.local_path(name)
        if folder is None or not folder.is_dir() or not pickles(folder):
            return tensor_names(folder or name) or ()
        from attnres_serve.checkpoints import read  # imports torch

        return [stored_name for path in read.files(folder) for stored_name, _ in read.tensors(path)]
    except CheckpointError:  # config.json alone tells that it is refused
        return ()


def conversion(name: str) -> str:
    """The command that converts a checkpoint, to which options can be added."""
    return CONVERT_COMMAND.replace("SRC", shlex.quote(name))


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
            index.check_values(name, read_tensor(headers, stored_name))


def read_tensor(headers: Mapping[str, Header], name: str) -> "Tensor":
    """One tensor of a checkpoint, as stored.

    Args:
        headers: of a checked checkpoint.
        name: its name in the checkpoint.
    """
    with opened(headers[name].file, "pt") as tensors:  # only here is torch imported
        tensor: Tensor = tensors.get_tensor(name)
        return tensor
