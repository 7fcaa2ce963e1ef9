"""A checkpoint to convert: its tensors, from safetensors or pickles, and their meaning."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve import formats
from attnres_serve.checkpoints import hub, plain_config
from attnres_serve.checkpoints import read as weights
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.checked import check_content
from attnres_serve.checkpoints.files import Header, read_config
from attnres_serve.checkpoints.headers import check_headers
from attnres_serve.checkpoints.names import TIED, is_of_images, is_unread
from attnres_serve.checkpoints.not_attnres import no_attnres
from attnres_serve.checkpoints.other_files import PICKLES, pickles
from attnres_serve.checkpoints.renaming.rename import RENAME_OPTION, Rename, new_names
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import check_tied
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import EMBEDDINGS, HEAD
from attnres_serve.formats import house
from attnres_serve.formats.family_config import family_config
from attnres_serve.formats.parsed_config import ParsedConfig

Stream = Iterator[tuple[Path, str, Tensor]]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        folder: its folder.
        config: the content of its config.json.
        parsed: its parsed form.  A standard model counts as one of the house format without a
            specification, because its tensors have the same names.
        headers: its tensors, file by file, by their new names.
        names: new names by the ones in the files, if they differ.
        has_new_config: whether ``config`` has keys that its config.json does not have.
    """

    folder: Path
    config: dict[str, Any]
    parsed: ParsedConfig
    headers: Mapping[str, Header]
    names: Mapping[str, str] = field(default_factory=dict)
    has_new_config: bool = False

    @property
    def format(self) -> Any:
        """The module of its format."""
        return formats.by_name(self.parsed.format)

    @cached_property
    def index(self) -> TensorIndex:
        """Its tensors by house names."""
        base = BaseTensors(self.parsed.family, self.parsed.config)
        index = TensorIndex(self.format, base, self.parsed.spec)
        for name, header in self.headers.items():
            index.enter(name, header)
        return index

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(header.file for header in self.headers.values()))

    @property
    def has_pickles(self) -> bool:
        return any(path.suffix in PICKLES for path in self.files)

    def tensors(self) -> Stream:
        """Every tensor with its file and its name."""
        for path in self.files:
            for name, tensor in weights.tensors(path):
                yield path, self.names.get(name, name), tensor

    def without_values(self) -> Stream:
        """Like ``tensors``, with shapes and dtypes but no values."""
        for name, header in self.headers.items():
            dtype = weights.TORCH_DTYPES[header.dtype]
            yield header.file, name, torch.empty(header.shape, dtype=dtype, device="meta")

    def in_house_names(self, tensors: Iterable[tuple[Path, str, Tensor]]) -> Stream:
        """Tensors under house names; fused and packed ones are split.

        The copy for a tied head, tensors that read images and unread tensors are left out.
        """
        for path, name, tensor in tensors:
            is_read = not is_unread(self.format.rename(name))
            if is_read and not self.is_tied_head(name) and not self.is_of_images(name):
                for part, piece in self.index.pieces(name, tensor):
                    yield path, part, piece

    def is_tied_head(self, name: str) -> bool:
        """Whether a tensor is the copy of the embedding that old files have for a tied head."""
        tied = self.parsed.config.get("tie_word_embeddings")
        return bool(tied) and self.format.rename(name) == HEAD

    def is_of_images(self, name: str) -> bool:
        """Whether a tensor reads images, which are not served."""
        return is_of_images(self.format.rename(name))

    def check_tied_head(self) -> None:
        """Raise CheckpointError unless the head of a tied model is the embedding, bit for bit."""
        if not any(self.is_tied_head(name) for name in self.headers):
            return
        stored_names = {
            self.index.stored_names[name]: name for name in TIED if name in self.index.stored
        }
        values = {
            stored_names[name]: tensor for _, name, tensor in self.tensors() if name in stored_names
        }
        if not values.keys() & {*EMBEDDINGS}:
            raise CheckpointError(f"{self.folder} lacks its embedding.")
        check_tied(values)


@dataclass(frozen=True)
class Conversion:
    """The arguments of ``convert``.

    Attributes:
        source: folder, or a model id whose files are in the Hugging Face cache.
        target: folder to make.
        to_house: whether to write the house format.
        adds_queries: whether a model with standard residuals gets zero queries.
        block_size: sublayers per block, if config.json does not state them.
        renames: other names for tensors.
    """

    source: str
    target: str
    to_house: bool = False
    adds_queries: bool = False
    block_size: int | None = None
    renames: tuple[Rename, ...] = ()

    @property
    def command(self) -> str:
        """The command line with these arguments."""
        arguments = ["attnres-serve", "convert", self.source, self.target]
        arguments += ["--to", "house"] if self.to_house else []
        arguments += ["--add-zero-queries"] if self.adds_queries else []
        arguments += ["--block-size", str(self.block_size)] if self.block_size is not None else []
        for rename in self.renames:
            arguments += [RENAME_OPTION, str(rename)]
        return shlex.join(arguments)


def open_source(conversion: Conversion) -> Source:
    """Read a checkpoint's names, shapes and types, and check them.

    Raises:
        CheckpointError: it cannot be converted.
    """
    folder = hub.on_this_machine(conversion.source)
    _refuse_lone_pickles(folder)
    config = read_config(folder)
    stored_headers = cache(lambda: _read_headers(folder))
    names = cache(lambda: new_names(stored_headers(), conversion.renames))
    headers = cache(
        lambda: {
            names().get(stored_name, stored_name): header
            for stored_name, header in stored_headers().items()
        }
    )
    checkpoint = check_content(config, headers, conversion.command)
    if checkpoint.parsed is None:
        return _plain_source(folder, config, headers(), names(), conversion)
    if conversion.adds_queries and checkpoint.parsed.spec is not None:
        raise CheckpointError(
            f"{conversion.source} has Attention Residuals already; zero queries are for models "
            "with standard residuals."
        )
    if conversion.block_size is not None and not conversion.adds_queries:
        raise CheckpointError(
            f"the config.json of {conversion.source} says where blocks begin, in the "
            f"{checkpoint.parsed.format} format; leave out --block-size (in sublayers), which is "
            "for models whose config.json does not."
        )
    return Source(folder, config, checkpoint.parsed, headers(), names())


def _plain_source(
    folder: Path,
    config: dict[str, Any],
    headers: Mapping[str, Header],
    names: Mapping[str, str],
    conversion: Conversion,
) -> Source:
    """A checkpoint with the config.json of a plain model, with or without queries."""
    queries = plain_config.queries(config, headers)
    is_to_be_stated = conversion.block_size is not None and not conversion.adds_queries
    if queries is None and is_to_be_stated:
        raise CheckpointError(
            f"{conversion.source} has no tensors of Attention Residuals for blocks of "
            f"{conversion.block_size} (in sublayers); add --add-zero-queries to give it some."
        )
    if queries is None and conversion.adds_queries:
        parsed = _standard_model(conversion.source, config)
        check_headers(parsed, headers, conversion.command)
        return Source(folder, config, parsed, headers, names)
    if queries is None or queries.variant or queries.options or not is_to_be_stated:
        plain = replace(conversion, adds_queries=False, block_size=None)
        raise no_attnres(conversion.source, config, headers, plain.command)
    config = config | queries.keys(conversion.block_size)
    checkpoint = check_content(config, lambda: headers, conversion.command)
    parsed = checkpoint.translated(conversion.source)
    return Source(folder, config, parsed, headers, names, has_new_config=True)


def _read_headers(folder: Path) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for path in weights.files(folder):
        for name, tensor in weights.tensors(path):
            if name in headers:
                raise CheckpointError(f"the tensor {name} is in more than one file.")
            headers[name] = weights.header(name, tensor, path)
    return headers


def _refuse_lone_pickles(folder: Path) -> None:
    """Raise the error of known contents for pickles without a config.json."""
    if folder.is_file() and folder.suffix in PICKLES:
        weights.read_pickle(folder)
    elif folder.is_dir() and not (folder / "config.json").exists():
        for path in pickles(folder):
            weights.read_pickle(path)


def _standard_model(name: str, config: dict[str, Any]) -> ParsedConfig:
    """A stock model with standard residuals, as one of the house format.

    Args:
        name: the checkpoint's name, for messages.
        config: the content of its config.json.

    Raises:
        CheckpointError: it is no model of a family.
    """
    family, architectures = str(config.get("model_type")), config.get("architectures")
    known = {name: family for name, family in FAMILIES.items() if family.is_stock}
    if (
        family not in known
        or architectures != [known[family].stock_architecture]
        or "auto_map" in config
    ):
        raise CheckpointError(
            f"{name} cannot be given queries: found model_type {family!r} and architectures "
            f"{architectures!r}; expected a model of a family in docs/use/families.md with "
            "standard residuals and no code of its own."
        )
    known[family].shapes(config)  # raises if a size is not stated
    return ParsedConfig(house.NAME, family, family_config(config, family, ()), None)
