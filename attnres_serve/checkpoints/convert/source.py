"""A checkpoint to be converted: its tensors, from safetensors or pickles, and what they mean."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve import formats
from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints import read as weights
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.checked import check_content
from attnres_serve.checkpoints.files import PICKLES, Header, pickles, read_config
from attnres_serve.checkpoints.names import TIED, is_of_images, is_unread
from attnres_serve.checkpoints.tensor_index import TensorIndex, check_headers
from attnres_serve.checkpoints.tensors import check_tied
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import EMBEDDINGS, HEAD
from attnres_serve.formats import house
from attnres_serve.formats.base_config import base_config
from attnres_serve.formats.parsed_config import ParsedConfig

Stream = Iterator[tuple[Path, str, Tensor]]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        folder: where it is.
        config: the content of its config.json.
        parsed: what that means.  A standard model counts as one of the house format, whose
            tensors have the same names, with no specification.
        headers: its tensors, file by file.
    """

    folder: Path
    config: dict[str, Any]
    parsed: ParsedConfig
    headers: Mapping[str, Header]

    @property
    def format(self) -> Any:
        """The module of its format."""
        return formats.by_name(self.parsed.format)

    @cached_property
    def index(self) -> TensorIndex:
        """Its tensors by house names."""
        base = BaseTensors(self.parsed.base, self.parsed.config)
        found = TensorIndex(self.format, base, self.parsed.spec)
        for name, header in self.headers.items():
            found.enter(name, header)
        return found

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(header.file for header in self.headers.values()))

    @property
    def has_pickles(self) -> bool:
        return any(path.suffix in PICKLES for path in self.files)

    def tensors(self) -> Stream:
        """File, name and tensor, one after the other."""
        for path in self.files:
            for name, tensor in weights.tensors(path):
                yield path, name, tensor

    def without_values(self) -> Stream:
        """The same with tensors that have shape and type alone."""
        for name, header in self.headers.items():
            dtype = weights.TORCH_DTYPES[header.dtype]
            yield header.file, name, torch.empty(header.shape, dtype=dtype, device="meta")

    def in_house_names(self, tensors: Iterable[tuple[Path, str, Tensor]]) -> Stream:
        """Tensors of ``tensors()``, fused and packed ones split, without the copy for a tied head.

        Those that read images are left out too, and those that nothing reads.
        """
        for path, name, tensor in tensors:
            own_code_reads = not is_unread(self.format.rename(name))
            if own_code_reads and not self.is_tied_head(name) and not self.is_of_images(name):
                for part, piece in self.index.pieces(name, tensor):
                    yield path, part, piece

    def is_tied_head(self, name: str) -> bool:
        """Whether a tensor is the copy of the embedding that old files hold for a tied head."""
        tied = self.parsed.config.get("tie_word_embeddings")
        return bool(tied) and self.format.rename(name) == HEAD

    def is_of_images(self, name: str) -> bool:
        """Whether a tensor reads images, which models are served without."""
        return is_of_images(self.format.rename(name))

    def check_tied_head(self) -> None:
        """Raise CheckpointError unless the head of a tied model is the embedding, bit for bit."""
        if not any(self.is_tied_head(name) for name in self.headers):
            return
        own_names = {self.index.own_names[name]: name for name in TIED if name in self.index.stored}
        values = {own_names[name]: found for _, name, found in self.tensors() if name in own_names}
        if not values.keys() & {*EMBEDDINGS}:
            raise CheckpointError(f"{self.folder} lacks its embedding.")
        check_tied(values)


def open_source(name: str, standard: bool) -> Source:
    """Read a checkpoint's names, shapes and types, and check them.

    Args:
        name: folder, or a model id whose files are in the Hugging Face cache.
        standard: whether a model with standard residuals is wanted instead of an AttnRes one.

    Raises:
        CheckpointError: it is no checkpoint that can be converted.
    """
    folder = hub.on_this_machine(name)
    _refuse_lone_pickles(folder)
    config = read_config(folder)
    found = check_content(config, lambda: _read_headers(folder))
    if found.parsed is None and standard:
        parsed = _standard_model(name, config)
        headers = _read_headers(folder)
        check_headers(parsed, headers)
        return Source(folder, config, parsed, headers)
    own = found.translated(name)
    if standard and own.spec is not None:
        raise CheckpointError(
            f"{name} has Attention Residuals already; zero queries are for models with standard "
            "residuals."
        )
    return Source(folder, config, own, found.headers)


def _read_headers(folder: Path) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for path in weights.files(folder):
        for name, tensor in weights.tensors(path):
            if name in headers:
                raise CheckpointError(f"the tensor {name} is in more than one file.")
            headers[name] = weights.header(name, tensor, path)
    return headers


def _refuse_lone_pickles(folder: Path) -> None:
    """Let pickles without a config.json be refused by what they hold, if that is known."""
    if folder.is_file() and folder.suffix in PICKLES:
        weights.read_pickle(folder)
    elif folder.is_dir() and not (folder / "config.json").exists():
        for path in pickles(folder):
            weights.read_pickle(path)


def _standard_model(name: str, config: dict[str, Any]) -> ParsedConfig:
    """A family's own model, with standard residuals, as one of the house format.

    Args:
        name: what it is called.
        config: the content of its config.json.

    Raises:
        CheckpointError: it is none of a family.
    """
    base, found = str(config.get("model_type")), config.get("architectures")
    known = {name: family for name, family in FAMILIES.items() if family.is_stock}
    if base not in known or found != [known[base].stock_architecture] or "auto_map" in config:
        raise CheckpointError(
            f"{name} cannot be given queries: found model_type {base!r} and architectures "
            f"{found!r}; expected a model of a family in docs/use/families.md with standard "
            "residuals and no code of its own."
        )
    known[base].shapes(config)  # says which size is not stated
    return ParsedConfig(house.NAME, base, base_config(config, base, ()), None)
