"""Replacement of a model's weights while its engine runs.

All new tensors are validated before a weight is changed: after a bad tensor the old weights stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve.checkpoints import hub, read
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.files import read_headers
from attnres_serve.checkpoints.finite import check_finite
from attnres_serve.checkpoints.names import TIED, is_draft
from attnres_serve.checkpoints.tensors import Stored, check_shape
from attnres_serve.compat import drafts, renewal, tensor_file
from attnres_serve.compat.renewal import DRAFT, TARGET, Update
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import EMBEDDINGS, HEAD
from attnres_serve.formats.keys import TRAINING_KEYS
from attnres_serve.model import origin
from attnres_serve.model.config import ATTN_RES_FIELDS, build
from attnres_serve.model.loading import LoadingMixin
from attnres_serve.model.origin import Origin


class ModelUpdate:
    """Tensors for an AttnRes model, by the names of its format or of the house format."""

    def __init__(self, worker: Any, model: LoadingMixin, config: Any, is_partial: bool) -> None:
        """Begin with no tensor.

        Args:
            worker: vLLM's worker.
            model: the served model, or the draft model.
            config: vLLM's configuration of the model.
            is_partial: whether tensors that are not sent keep their values.
        """
        self._worker, self._model, self._config = worker, model, config
        self._is_partial = is_partial
        self._index = model.attn_res_index(takes_house_names=True)
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        parts = self._index.take(name, _header(name, tensor))
        first = next(iter(parts))
        tensor = _copy(tensor)  # its owner may change it
        check_finite(name, tensor, self._model.attn_res_served_in(first, parts[first]))
        for part, piece in self._index.pieces(name, tensor):
            self._index.check_values(part, piece)
        # A tied tensor may come under the name that another stage needs.
        is_tied = self._base.is_tied and not parts.keys().isdisjoint(TIED)
        if is_tied or any(map(self._model.attn_res_is_here, parts)):
            self._tensors[name] = tensor

    def apply(self) -> None:
        sent = {name for name in self._index.stored if is_draft(name, self._base.config)}
        if missing := sorted(self._model.attn_res_draft_head - sent) if sent else []:
            raise CheckpointError(
                f"the update lacks the tensor {missing[0]} (in house names) of the head that "
                "predicts further tokens; send all of its tensors, or none."
            )
        has_draft_head = bool(sent) and self._model.attn_res_has_draft_head
        if self._is_partial:
            self._apply_partial(has_draft_head)
            return
        self._index.close()
        renew(self._worker, self._model, self._config, self._tensors.items, has_draft_head)
        self._model.attn_res_origin = Origin(None)

    @property
    def _base(self) -> Any:
        return self._model.attn_res_base

    def _apply_partial(self, has_draft_head: bool) -> None:
        of_rest = self._model.attn_res_origin
        folder = of_rest.folder()
        check_replacement(self._model, str(folder))
        sent: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            sent |= self._index.pieces(name, tensor)
        newer = of_rest.with_newer(sent, self._base.is_tied)

        def whole() -> Iterator[tuple[str, Tensor]]:
            yield from newer.items()
            yield from origin.rest(
                self._model.attn_res_index(True), folder, newer, self._base.is_tied
            )
            of_rest.check_unchanged("the rest of the update was being read from")

        together = self._model.attn_res_index(takes_house_names=True)
        for name, tensor in whole():
            together.take(name, _header(name, tensor))
            for part, piece in together.pieces(name, tensor):
                together.check_values(part, piece)
        together.close()
        renew(self._worker, self._model, self._config, whole, has_draft_head)
        of_rest.newer = newer


class DraftUpdate:
    """Tensors for a draft model or draft head without sites: exactly those of its folder."""

    def __init__(self, worker: Any, model: torch.nn.Module, config: Any) -> None:
        self._worker, self._model, self._config = worker, model, config
        if (folder := hub.local_path(config.model)) is None:
            raise CheckpointError(
                f"the drafts of {config.model} are not read from a folder, so their tensors are "
                "not known; start a new engine with new drafts."
            )
        self._expected: Mapping[str, Stored] = read_headers(folder)
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        header = _header(name, tensor)
        if name not in self._expected or name in self._tensors:
            how = "has come before" if name in self._tensors else "is not in its folder"
            raise CheckpointError(f"the tensor {name} of the draft {how}; send each one once.")
        check_shape(name, header.shape, self._expected[name].shape)
        tensor = _copy(tensor)  # its owner may change it
        check_finite(name, tensor, self._config.dtype)
        self._tensors[name] = tensor

    def apply(self) -> None:
        if missing := self._expected.keys() - self._tensors.keys():
            raise CheckpointError(f"the update of the draft lacks the tensor {min(missing)}.")
        renew(self._worker, self._model, self._config, self._tensors.items)


def begin(worker: Any, is_draft_model: bool = False, is_partial: bool = False) -> Update:
    """An update of a worker's served model or draft model.

    Raises:
        CheckpointError: there is no draft model, or its tensors are not known.
    """
    if not is_draft_model:
        model: Any = worker.get_model()
        return ModelUpdate(worker, model, worker.model_config, is_partial)
    draft = drafts.draft_model(worker)
    if draft is None:
        raise CheckpointError("this engine has no draft model whose weights could be replaced.")
    if isinstance(draft[0], LoadingMixin):
        return ModelUpdate(worker, *draft, is_partial)
    return DraftUpdate(worker, *draft)


def from_folder(worker: Any, name: str | None) -> None:
    """Replace a worker's weights by those of a folder.

    Args:
        worker: vLLM's worker.
        name: the folder, or a model id whose files are on this machine; None for the served model.

    Raises:
        CheckpointError: the folder has no valid checkpoint of this model; nothing was changed.
    """
    model: Any = worker.get_model()
    revision = worker.model_config.revision if name is None else None
    folder = str(hub.on_this_machine(name or worker.model_config.model, revision))
    new_origin = Origin(folder)  # before its values are read
    check_replacement(model, folder)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from origin.stored(Path(folder))
        new_origin.check_unchanged("the weights were being read from")

    renew(worker, model, worker.model_config, tensors, model.attn_res_has_draft_head)
    worker.model_config.model, worker.model_config.revision = folder, None
    model.attn_res_origin = new_origin


def check_replacement(model: LoadingMixin, folder: str) -> None:
    """Raise CheckpointError unless a folder's checkpoint may replace the loaded one.

    It reads all values.
    """
    checkpoint = check_folder(Path(folder))
    if key := _difference(model.config, build(checkpoint.translated(folder))):
        raise CheckpointError(
            f"{folder} is of another model than the one that runs, by its config.json ({key}); "
            "start a new engine with it."
        )
    for path in read.files(Path(folder)):
        for name, tensor in read.tensors(path):
            check_finite(name, tensor, model.attn_res_dtype)


def _difference(one: object, other: object) -> str | None:
    """The first key of config.json in which two configurations of ``build`` differ, or None."""
    for field in reversed(ATTN_RES_FIELDS):  # others follow from attn_res_config
        first, second = getattr(one, field), getattr(other, field)
        if field != "attn_res_config":
            if first != second:
                return field
            continue
        keys: set[str] = {*first, *second} - {*TRAINING_KEYS, "transformers_version"}
        for key in sorted(keys):
            if first.get(key) != second.get(key):
                return key
    return None


@contextmanager
def expecting(model: LoadingMixin, takes_house_names: bool = False) -> Iterator[None]:
    """Let a validated checkpoint replace the loaded one.

    Args:
        model: the loaded model.
        takes_house_names: whether its tensors may have house names in any format.
    """
    model.attn_res_loaded, model.attn_res_takes_house_names = False, takes_house_names
    try:
        yield
    finally:
        model.attn_res_loaded, model.attn_res_takes_house_names = True, False


def renew(worker: Any, model: Any, config: Any, tensors: Any, has_draft_head: bool = False) -> None:
    """Load a model again, and the draft head of the same checkpoint.

    Args:
        worker: vLLM's worker; its ``attn_res_broken`` names models without whole weights.
        model: the model to load.
        config: vLLM's configuration of the model.
        tensors: returns all its validated tensors on every call.
        has_draft_head: whether the tensors include those of a draft head in use.
    """
    draft = drafts.draft_model(worker) if has_draft_head else None
    names = {TARGET if model is worker.get_model() else DRAFT} | ({DRAFT} if draft else set())
    with _broken(worker, names):
        if isinstance(model, LoadingMixin):
            untied = getattr(config, "word_embeddings_untied_by_checkpoint", False)
            adds_head = untied and model.attn_res_base.is_tied

            def whole() -> Iterator[tuple[str, Tensor]]:
                return _with_head(model, tensors()) if adds_head else iter(tensors())

            with expecting(model, takes_house_names=True):
                renewal.renew(model, config, lambda: model.load_weights(whole()))
        else:
            renewal.renew(model, config, lambda: model.load_weights(tensors()))
        if draft is not None:
            draft_head, draft_config = draft
            renewal.renew(draft_head, draft_config, lambda: draft_head.load_weights(tensors()))


def _with_head(
    model: LoadingMixin, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors and, if it is not among them, the head of a tied model.

    vLLM's model has a separate parameter for the head if its first checkpoint stored one.
    """
    index, embedding, has_head = model.attn_res_index(takes_house_names=True), None, False
    for stored_name, tensor in tensors:
        for name, piece in index.pieces(stored_name, tensor):
            has_head |= name == HEAD
            embedding = piece if name in EMBEDDINGS else embedding
        yield stored_name, tensor
    if not has_head and embedding is not None:
        yield HEAD, embedding


@contextmanager
def _broken(worker: Any, names: set[str]) -> Iterator[None]:
    """Mark models of a worker as without whole weights; after a failure they stay marked."""
    others: set[str] = set(getattr(worker, "attn_res_broken", ())) - names
    worker.attn_res_broken = others | names
    yield
    worker.attn_res_broken = others


def _header(name: str, tensor: Any) -> Stored:
    """The header of a tensor.

    Raises:
        CheckpointError: it is no tensor, or has no values.
    """
    tensor_file.require_tensor(name, tensor)
    return read.header(name, read.plain(name, tensor, Path("the update")), Path("the update"))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
