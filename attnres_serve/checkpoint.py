"""A checkpoint as far as it can be judged without an engine: by its config.json and the names and
shapes of its tensors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve import formats, hub
from attnres_serve.base_tensors import BaseTensors
from attnres_serve.errors import CheckpointError
from attnres_serve.folder import INDEX, Header, read_config, read_headers, weight_map
from attnres_serve.formats.translation import Translation
from attnres_serve.resolver import resolve
from attnres_serve.tensors import (
    TIED,
    Stored,
    by_house_name,
    check_dtype,
    check_sites,
    check_spare_bias,
    check_tied,
    parts_of,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was judged.

    Attributes:
        config: the content of config.json.
        translation: what the resolver made of it, None where this is no AttnRes checkpoint.
        headers: its tensors by their own names; none where it is no AttnRes checkpoint, or a model
            id whose headers cannot be had.
    """

    config: dict[str, Any]
    translation: Translation | None
    headers: Mapping[str, Header]

    def translated(self, name: str) -> Translation:
        """What the resolver made of it, where it must be an AttnRes checkpoint.

        Args:
            name: what it is called.

        Raises:
            CheckpointError: it is none.
        """
        if self.translation is None:
            raise CheckpointError(
                f"{name} is not an AttnRes checkpoint that can be served: found model_type "
                f"{self.config.get('model_type')!r} and architectures "
                f"{self.config.get('architectures')!r}; {formats.SUPPORTED}."
            )
        return self.translation


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
    if index.is_file():  # enough to tell names, also where the files themselves are elsewhere
        return weight_map(index)
    return read_headers(folder) if any(folder.glob("*.safetensors")) else None


def recognise(
    config: dict[str, Any],
    own_code: bool,
    name: str | Path,
    revision: str | None = None,
) -> Translation | None:
    """``resolve`` with the tensors of the checkpoint ``name`` at hand."""
    return resolve(config, own_code, lambda: tensor_names(name, revision))


def judge(config: dict[str, Any], headers: Callable[[], Mapping[str, Header]]) -> Checkpoint:
    """Resolve a configuration and check that its tensors are exactly those the model needs.

    Args:
        config: the content of config.json.
        headers: gives its tensors; called, once, only if this may be an AttnRes checkpoint.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    headers = cache(headers)
    translation = resolve(config, names=headers)
    if translation is None:
        return Checkpoint(config, None, {})
    found = headers()
    check_headers(translation, found)
    return Checkpoint(config, translation, found)


def examine(folder: Path) -> Checkpoint:
    """Judge a checkpoint folder by its config.json and the headers of its safetensors files.

    Of the tensors themselves only a head is read that is stored although it is tied, and biases
    that the model has not where its quantisation writes some.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    found = judge(read_config(folder), lambda: read_headers(folder))
    _check_values(found)
    return found


def examine_hub(name: str, revision: str | None = None) -> Checkpoint:
    """The same for a Hugging Face model id, as far as the headers of its files can be had.

    Raises:
        CheckpointError: for anything that cannot be served exactly, or a model that does not exist.
    """
    config = hub.read_config(name, revision)
    translation = recognise(config, False, name, revision)
    headers = None if translation is None else hub.read_shared_headers(name, revision)
    if translation is not None and headers is not None:
        check_headers(translation, headers)
    return Checkpoint(config, translation, headers or {})


def require(name: str, revision: str | None = None, has_weights: bool = True) -> Checkpoint:
    """Judge a folder, or a Hugging Face model id, that must be an AttnRes checkpoint.

    Args:
        name: the folder or the model id.
        revision: branch, tag or commit of a model id.
        has_weights: whether its weights will be read; otherwise config.json alone must fit.

    Raises:
        CheckpointError: it cannot be served exactly as it was trained.
    """
    folder = hub.local_path(name)
    if not has_weights:
        config = hub.read_config(name, revision) if folder is None else read_config(folder)
        found = Checkpoint(config, recognise(config, False, folder or name, revision), {})
    elif folder is None:
        found = examine_hub(name, revision)
    else:
        found = examine(folder)
    found.translated(name)
    return found


def check_headers(translation: Translation, headers: Mapping[str, Header]) -> None:
    """Judge whether tensors are exactly those that a model needs, by their headers.

    Args:
        translation: what the resolver made of config.json.
        headers: the tensors by the checkpoint's own names.

    Raises:
        CheckpointError: one is missing, left over, misshapen or of a type that cannot be read.
    """
    module = formats.by_name(translation.format)
    parts: dict[str, Stored] = {}
    for name, header in headers.items():
        for part, shape in parts_of(module, name, header.shape).items():
            parts[part] = Stored(shape, header.dtype)
        if not translation.config.get("quantization_config"):
            check_dtype(name, header.dtype)
    own_names = by_house_name(parts, module.rename)
    stored = {name: parts[own] for name, own in own_names.items()}
    check_sites(translation, stored, own_names)
    base = BaseTensors(translation.base, translation.config)
    base.require(stored, own_names)
    for name, own in own_names.items():
        base.check(name, own, stored[name])


def _check_values(found: Checkpoint) -> None:
    """Judge the tensors whose values decide: a head that is tied and stored all the same, and
    biases that the model has not, which some quantisations write as zeros.

    Raises:
        CheckpointError: the head has other values than the embedding, or a bias is not zero.
    """
    translation = found.translation
    if translation is None:
        return
    rename = formats.by_name(translation.format).rename
    base = BaseTensors(translation.base, translation.config)
    own = {rename(name): name for name in found.headers}
    tied = [name for name in TIED if name in own and translation.config.get("tie_word_embeddings")]
    if len(tied) == len(TIED):
        check_tied({name: _read(found.headers, own[name]) for name in tied})
    for name in filter(base.is_spare_bias, own):
        check_spare_bias(own[name], _read(found.headers, own[name]))


def _read(headers: Mapping[str, Header], name: str) -> "Tensor":
    from safetensors import safe_open  # torch is not imported for the usual checkpoint

    with safe_open(headers[name].file, framework="pt") as tensors:
        return tensors.get_tensor(name)
