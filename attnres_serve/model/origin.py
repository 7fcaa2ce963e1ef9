"""The origin of a running model's weights, which a partial update reads the other tensors from."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from attnres_serve.checkpoints import hub, read
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import EMBEDDINGS, HEAD

WAY = "send all tensors, or give weights_path once."


class Origin:
    """A folder, and tensors that have replaced some of the folder's.

    Attributes:
        name: the folder or model id; None after an update by tensors alone.
        newer: the replacements, by house names.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.newer: dict[str, Tensor] = {}
        self._stamp = self._files()

    def folder(self) -> Path:
        """The folder of the tensors that a partial update leaves out.

        Raises:
            CheckpointError: there is no folder, or its files have changed.
        """
        local = None if self.name is None else hub.local_path(self.name)
        if local is None:
            raise CheckpointError(
                "the update is declared partial, and the other tensors came from a trainer or are "
                f"no longer in a folder; {WAY}"
            )
        self.check_unchanged("the update is declared partial, and the other tensors are read from")
        return local

    def check_unchanged(self, what: str) -> None:
        """Raise CheckpointError if the folder's files have changed since this was made.

        Args:
            what: the beginning of the sentence, before the folder.
        """
        if self._files() != self._stamp:
            raise CheckpointError(f"{what} {self.name}, whose files have changed meanwhile; {WAY}")

    def with_newer(self, sent: Mapping[str, Tensor], is_tied: bool) -> dict[str, Tensor]:
        """The replacements of the folder's tensors with an update, by house names.

        Args:
            sent: the tensors of the update.
            is_tied: whether the head is the embedding; then a new embedding drops an older head.
        """
        outdated = _outdated_head(sent, is_tied)
        return {name: x for name, x in self.newer.items() if name not in outdated} | {**sent}

    def _files(self) -> dict[str, tuple[int, int]]:
        local = None if self.name is None else hub.local_path(self.name)
        if local is None:
            return {}
        stats = ((path.name, path.stat()) for path in local.glob("*.safetensors"))
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by their names in it."""
    for path in read.files(folder):
        yield from read.tensors(path)


def _outdated_head(newer: Mapping[str, Tensor], is_tied: bool) -> set[str]:
    """The head's name, if the head is the embedding and newer tensors have a new embedding."""
    return {HEAD} if is_tied and not newer.keys().isdisjoint(EMBEDDINGS) else set()


def rest(
    index: TensorIndex, folder: Path, newer: Mapping[str, Tensor], is_tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that have no replacement.

    Args:
        index: an index of the same model without the folder's tensors.
        folder: the checkpoint.
        newer: the replacements, by house names.
        is_tied: whether the head is the embedding; then a new embedding replaces the head.

    Yields:
        A tensor by its stored name, or a part of a fused tensor by its house name.
    """
    taken = newer.keys() | _outdated_head(newer, is_tied)
    for stored_name, tensor in stored(folder):
        parts = dict(index.pieces(stored_name, tensor))
        left = {name: piece for name, piece in parts.items() if name not in taken}
        yield from ([(stored_name, tensor)] if len(left) == len(parts) else left.items())
