"""A checkpoint to be converted: its tensors, from safetensors or pickles, and what they mean."""

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
from attnres_serve.checkpoints.checked import check_content, no_attnres
from attnres_serve.checkpoints.files import PICKLES, Header, pickles, read_config
from attnres_serve.checkpoints.headers import check_headers
from attnres_serve.checkpoints.names import TIED, is_of_images, is_unread
from attnres_serve.checkpoints.renaming.rename import OPTION, Rename, new_names
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
        folder: where it is.
        config: the content of its config.json.
        parsed: what that means.  A standard model counts as one of the house format, whose
            tensors have the same names, with no specification.
        headers: its tensors, file by file, by the names that they are given.
        names: those names by the ones in the files, where they differ.
        has_new_config: whether ``config`` has keys that its config.json has not.
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
                yield path, self.names.get(name, name), tensor

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


@dataclass(frozen=True)
class Asked:
    """What ``convert`` is asked to make of a source.

    Attributes:
        source: folder, or a model id whose files are in the Hugging Face cache.
        target: folder to make.
        to_house: whether into the house format.
        adds_queries: whether a model with standard residuals gets zero queries.
        block_size: sublayers per block, where config.json does not state them.
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
        """The command line that asks for this."""
        words = ["attnres-serve", "convert", self.source, self.target]
        words += ["--to", "house"] if self.to_house else []
        words += ["--add-zero-queries"] if self.adds_queries else []
        words += ["--block-size", str(self.block_size)] if self.block_size is not None else []
        for rename in self.renames:
            words += [OPTION, str(rename)]
        return shlex.join(words)


def open_source(asked: Asked) -> Source:
    """Read a checkpoint's names, shapes and types, and check them.

    Raises:
        CheckpointError: it is no checkpoint that can be converted.
    """
    folder = hub.on_this_machine(asked.source)
    _refuse_lone_pickles(folder)
    config = read_config(folder)
    own_headers = cache(lambda: _read_headers(folder))
    names = cache(lambda: new_names(own_headers(), asked.renames))
    headers = cache(
        lambda: {names().get(own, own): header for own, header in own_headers().items()}
    )
    found = check_content(config, headers, asked.command)
    if found.parsed is None:
        return _plain_source(folder, config, headers(), names(), asked)
    if asked.adds_queries and found.parsed.spec is not None:
        raise CheckpointError(
            f"{asked.source} has Attention Residuals already; zero queries are for models with "
            "standard residuals."
        )
    if asked.block_size is not None and not asked.adds_queries:
        raise CheckpointError(
            f"the config.json of {asked.source} says where blocks begin, in the "
            f"{found.parsed.format} format; leave out --block-size (in sublayers), which is for "
            "models whose config.json does not."
        )
    return Source(folder, config, found.parsed, headers(), names())


def _plain_source(
    folder: Path,
    config: dict[str, Any],
    headers: Mapping[str, Header],
    names: Mapping[str, str],
    asked: Asked,
) -> Source:
    """A checkpoint with the config.json of a plain model, which may have queries all the same."""
    queries = plain_config.queries(config, headers)
    is_to_be_stated = asked.block_size is not None and not asked.adds_queries
    if queries is None and is_to_be_stated:
        raise CheckpointError(
            f"{asked.source} has no tensors of Attention Residuals for blocks of "
            f"{asked.block_size} (in sublayers); add --add-zero-queries to give it some."
        )
    if queries is None and asked.adds_queries:
        parsed = _standard_model(asked.source, config)
        check_headers(parsed, headers, asked.command)
        return Source(folder, config, parsed, headers, names)
    if queries is None or queries.variant or queries.options or not is_to_be_stated:
        plain = replace(asked, adds_queries=False, block_size=None)
        raise no_attnres(asked.source, config, headers, plain.command)
    config = config | queries.keys(asked.block_size)
    found = check_content(config, lambda: headers, asked.command)
    parsed = found.translated(asked.source)
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
    return ParsedConfig(house.NAME, base, family_config(config, base, ()), None)
