"""Checks a checkpoint without an engine: by its config.json and the names and shapes of its
tensors."""

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
from attnres_serve.checkpoints.renaming.rename import COMMAND
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
    """A checkpoint that was checked.

    Attributes:
        config: the content of config.json.
        parsed: what the resolver made of it, None where this is no AttnRes checkpoint.
        headers: its tensors by their own names; none where it is no AttnRes checkpoint, or a model
            id whose headers cannot be had.
        index: the same tensors by house names, None where there are no headers.
    """

    config: dict[str, Any]
    parsed: ParsedConfig | None
    headers: Mapping[str, Header]
    index: TensorIndex | None = None

    def translated(self, name: str) -> ParsedConfig:
        """What the resolver made of it, where it must be an AttnRes checkpoint.

        Args:
            name: what it is called.

        Raises:
            CheckpointError: it is none.
        """
        if self.parsed is None:
            is_known = str(self.config.get("model_type")) in FAMILIES
            names = _names_of_any(name) if is_known else ()
            raise no_attnres(name, self.config, names, conversion(name))
        return self.parsed

    def has_table(self, leaf: str, table: "Tensor") -> bool:
        """Whether a table [tokens, hidden] equals that of a leaf, in the type of fewer digits."""
        import torch

        if self.index is None:  # its weights are not here
            return True
        names = self.index.own_names
        own = names.get(HEAD if leaf == "lm_head" else EMBEDDING) or names.get(EMBEDDING)
        if own is None or own not in self.headers:
            return False
        stored = read_tensor(self.headers, own)
        if stored.shape != table.shape or not stored.is_floating_point():
            return False
        common = min(stored.dtype, table.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        return bool(torch.equal(stored.to(common), table.to(common)))


def no_attnres(
    name: str, config: dict[str, Any], names: Collection[str], command: str
) -> CheckpointError:
    """The refusal of what is not recognised as an AttnRes checkpoint.

    Args:
        name: what it is called.
        config: the content of its config.json.
        names: of its tensors, as far as they are known.
        command: of ``convert``, to which options can be added.
    """
    if found := plain_config.queries(config, names):
        return CheckpointError(found.advice(name, command))
    said = (
        f"{name} is not an AttnRes checkpoint that can be served: found model_type "
        f"{config.get('model_type')!r} and architectures "
        f"{config.get('architectures')!r}; {formats.SUPPORTED}."
    )
    if str(config.get("model_type")) in FAMILIES:
        way = f"{command} --add-zero-queries --block-size 4"
        said += f" Make an AttnRes model of it, with queries to train, by `{way}`."
    return CheckpointError(said)


def _names_of_any(name: str) -> Collection[str]:
    """Names of a checkpoint's tensors, of pickles too; none where they cannot be had."""
    try:
        folder = hub.local_path(name)
        if folder is None or not folder.is_dir() or not pickles(folder):
            return tensor_names(folder or name) or ()
        from attnres_serve.checkpoints import read  # imports torch

        return [own for path in read.files(folder) for own, _ in read.tensors(path)]
    except CheckpointError:  # config.json alone tells that it is refused
        return ()


def conversion(name: str) -> str:
    """The command that converts a checkpoint, to which options can be added."""
    return COMMAND.replace("SRC", shlex.quote(name))


def tensor_names(name: str | Path, revision: str | None = None) -> Collection[str] | None:
    """Names of a checkpoint's tensors, None where it has no safetensors files that can be had.

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
    own_code: bool,
    name: str | Path,
    revision: str | None = None,
) -> ParsedConfig | None:
    """``resolve`` with the tensors of the checkpoint ``name`` at hand."""
    return resolve(config, own_code, lambda: tensor_names(name, revision))


def check_content(
    config: dict[str, Any],
    headers: Callable[[], Mapping[str, Header]],
    command: str = COMMAND,
) -> Checkpoint:
    """Validate what a checkpoint says of itself, wherever that is from.

    Args:
        config: the content of config.json.
        headers: gives its tensors; called, once, only if this may be an AttnRes checkpoint.
        command: of ``convert``, which could rename them.

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

    Of the tensors themselves only a head is read that is stored although it is tied, and biases
    that the model does not have where its quantisation writes some.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    command = conversion(str(folder))
    found = check_content(read_config(folder), lambda: read_headers(folder), command)
    if found.index is not None:
        _check_values(found.index, found.headers)
    return found


def check_hub(name: str, revision: str | None = None) -> Checkpoint:
    """The same for a Hugging Face model id, as far as the headers of its files can be had.

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
        has_weights: whether its weights will be read; otherwise config.json alone must fit.

    Raises:
        CheckpointError: it cannot be served as its config.json describes.
    """
    folder = hub.local_path(name)
    if not has_weights:
        config = hub.read_config(name, revision) if folder is None else read_config(folder)
        found = Checkpoint(config, translate(config, False, folder or name, revision), {})
    elif folder is None:
        found = check_hub(name, revision)
    else:
        found = check_folder(folder)
    found.translated(name)
    return found


def _check_values(index: TensorIndex, headers: Mapping[str, Header]) -> None:
    """Check the tensors whose values decide, after their headers.

    Raises:
        CheckpointError: a tied head has other values than the embedding, or a bias that the model
            does not have is not zero.
    """
    for name, own in index.own_names.items():
        if own in headers and index.has_telling_values(name):
            index.check_values(name, read_tensor(headers, own))


def read_tensor(headers: Mapping[str, Header], name: str) -> "Tensor":
    """One tensor of a checkpoint, as it is stored.

    Args:
        headers: those of a checked checkpoint.
        name: the checkpoint's own name of it.
    """
    with opened(headers[name].file, "pt") as tensors:  # torch is not imported for the usual one
        tensor: Tensor = tensors.get_tensor(name)
        return tensor
