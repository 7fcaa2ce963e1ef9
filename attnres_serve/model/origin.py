"""Where the weights of a running model come from, so that a part of them can be replaced."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from attnres_serve.checkpoints import hub, read
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import EMBEDDINGS, HEAD

WAY = "send all tensors, or give weights_path once."


class Origin:
    """A folder, and tensors that have taken the place of some of its.

    Attributes:
        name: the folder or model id; None after an update by tensors alone.
        newer: those tensors, by house names.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.newer: dict[str, Tensor] = {}
        self._stamp = self._files()

    def folder(self) -> Path:
        """The folder of the rest of a partial update.

        Raises:
            CheckpointError: there is none, or its files have changed.
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
        """Raise CheckpointError if the folder's files are others than when this was made.

        Args:
            what: begins the sentence, before the folder.
        """
        if self._files() != self._stamp:
            raise CheckpointError(f"{what} {self.name}, whose files have changed meanwhile; {WAY}")

    def with_newer(self, sent: Mapping[str, Tensor], is_tied: bool) -> dict[str, Tensor]:
        """What takes the place of the folder's tensors with further ones, by house names.

        Args:
            sent: the further ones.
            is_tied: whether the head is the embedding; an older one of it does not stay then.
        """
        twin = _twin(sent, is_tied)
        return {name: x for name, x in self.newer.items() if name not in twin} | {**sent}

    def _files(self) -> dict[str, tuple[int, int]]:
        local = None if self.name is None else hub.local_path(self.name)
        if local is None:
            return {}
        found = ((path.name, path.stat()) for path in local.glob("*.safetensors"))
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found}


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by their own names."""
    for path in read.files(folder):
        yield from read.tensors(path)


def _twin(newer: Mapping[str, Tensor], is_tied: bool) -> set[str]:
    """The head, where it is the embedding and that is among newer tensors; nothing otherwise."""
    return {HEAD} if is_tied and not newer.keys().isdisjoint(EMBEDDINGS) else set()


def rest(
    index: TensorIndex, folder: Path, newer: Mapping[str, Tensor], is_tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder without those that others have taken the place of.

    Args:
        index: of the same model, which no tensor of the folder was entered in.
        folder: the checkpoint.
        newer: those others, by house names.
        is_tied: whether the head is the embedding, and comes with a newer one.

    Yields:
        A tensor by its own name, or a part of one by its house name.
    """
    taken = newer.keys() | _twin(newer, is_tied)
    for own, tensor in stored(folder):
        parts = dict(index.pieces(own, tensor))
        left = {name: piece for name, piece in parts.items() if name not in taken}
        yield from ([(own, tensor)] if len(left) == len(parts) else left.items())
