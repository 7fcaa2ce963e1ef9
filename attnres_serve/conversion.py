"""What ``attnres-serve convert`` will write, planned from names, shapes and types alone.

The plan is judged as the checkpoint that it will be, by the same check that serving uses, before a
byte is written.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve import formats, hub, weights
from attnres_serve.checkpoint import (
    INDEX,
    PICKLES,
    Checkpoint,
    Header,
    judge,
    not_attnres,
    pickles,
    read_config,
)
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import house
from attnres_serve.formats.translation import Translation
from attnres_serve.resolver import resolve
from attnres_serve.schedule import sites
from attnres_serve.spec import AttnResSpec
from attnres_serve.tensors import base_shapes, check_tensors, parts_of, tensor_name

# Taken over as they are.
KEPT = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Stream = Iterator[tuple[Path, str, Tensor]]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        folder: where it is.
        config: the content of its config.json.
        translation: what that means.  A standard model counts as one of the house format, whose
            tensors have the same names, with no specification.
        headers: its tensors, file by file.
    """

    folder: Path
    config: dict[str, Any]
    translation: Translation
    headers: dict[str, Header]

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


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        source: what it is made from.
        keeps_format: whether names and config.json stay as they are, and only pickles go.
        added: tensors that the source has not, by their house names.
        result: the checkpoint that it will be.
        shards: the tensors of every file of weights, by the file's name.
        kept: files of the source that are taken over as they are.
        left: names of those that are not.
    """

    source: Source
    keeps_format: bool
    added: dict[str, Tensor]
    result: Checkpoint
    shards: dict[str, dict[str, Header]]
    kept: list[Path]
    left: list[str]

    @property
    def size(self) -> int:
        """Bytes of what is written, config.json and headers left aside."""
        tensors = sum(header.stored_bytes for header in self.result.headers.values())
        return tensors + sum(path.stat().st_size for path in self.kept)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of ``shards``."""
        stream = _rewritten(self.source, self.source.tensors(), self.keeps_format, self.added)
        return ((name, tensor) for _, name, tensor in stream)


def open_source(name: str, standard: bool) -> Source:
    """Read a checkpoint's names, shapes and types, and judge them.

    Args:
        name: folder, or a model id whose files are in the Hugging Face cache.
        standard: whether a model with standard residuals is wanted instead of an AttnRes one.

    Raises:
        CheckpointError: it is no checkpoint that can be converted.
    """
    folder = hub.on_this_machine(name)
    _refuse_lone_pickles(folder)
    config = read_config(folder)
    found = judge(config, lambda: _read_headers(folder))
    if found.translation is None and not standard:
        raise not_attnres(name, config)
    if found.translation is None:
        translation, headers = _standard(name, config), _read_headers(folder)
        shapes = {tensor: header.shape for tensor, header in headers.items()}
        check_tensors(translation, shapes, house.rename)
        return Source(folder, config, translation, headers)
    if standard and found.translation.spec is not None:
        raise CheckpointError(
            f"{name} has Attention Residuals already; zero queries are for models with standard "
            "residuals."
        )
    return Source(folder, config, found.translation, dict(found.headers))


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


def _standard(name: str, config: dict[str, Any]) -> Translation:
    """A family's own model, with standard residuals."""
    base, found = str(config.get("model_type")), config.get("architectures")
    known = {family: entry.architecture for family, entry in FAMILIES.items()}
    if base not in known or found != [known[base].removeprefix("AttnRes")] or "auto_map" in config:
        raise CheckpointError(
            f"{name} cannot be given queries: found model_type {base!r} and architectures "
            f"{found!r}; expected a model of {', '.join(known)} with standard residuals and no "
            "code of its own."
        )
    base_shapes(base, config)  # says which size is not stated
    return Translation(house.NAME, base, config, None)


def make_plan(source: Source, to_house: bool, block_size: int | None) -> Plan:
    """Plan a conversion and judge what will come of it.

    Args:
        source: what to convert.
        to_house: whether into the house format; otherwise pickles become safetensors.
        block_size: sublayers per block of the queries to add; None adds none.

    Raises:
        CheckpointError: nothing would change, or the result could not be served exactly.
    """
    added: dict[str, Tensor] = {}
    if block_size is not None:
        source, added = _with_zero_queries(source, block_size)
    keeps_format = not added and (not to_house or source.translation.format == house.NAME)
    if keeps_format and not source.has_pickles:
        mend = "" if source.translation.format == house.NAME else "; did you mean `--to house`?"
        raise CheckpointError(
            f"{source.folder} is in safetensors already, in the {source.translation.format} format"
            f"{mend or '.'}"
        )
    config = source.config if keeps_format else house_config(source.translation)
    if not keeps_format:
        _refuse_renamed_quantisation(source)
    _check_tied(source)
    headers: dict[str, Header] = {}
    for path, name, tensor in _rewritten(source, source.without_values(), keeps_format, added):
        headers[name] = weights.header(name, tensor, path)
    kept, left = _other_files(source)
    return Plan(
        source, keeps_format, added, judge(config, lambda: headers), _shards(headers), kept, left
    )


def _with_zero_queries(source: Source, block_size: int) -> tuple[Source, dict[str, Tensor]]:
    """A standard model as the AttnRes model that begins as it, and the tensors it needs for that.

    Zero queries make every mix a plain mean, whose scale the norm behind it takes away, up to its
    eps.
    """
    config = source.translation.config
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    spec = AttnResSpec.uniform(layers, block_size, config.get("rms_norm_eps", 1e-6))
    rename = formats.by_name(source.translation.format).rename
    found = [header.dtype for name, header in source.headers.items() if rename(name) == EMBEDDING]
    if not found:
        raise CheckpointError(f"{source.folder} lacks the tensor {EMBEDDING} (in house names).")
    dtype = weights.TORCH_DTYPES[found[0]]
    added: dict[str, Tensor] = {}
    for site in sites(spec):
        added[tensor_name(site.index, "proj", layers)] = torch.zeros((1, hidden), dtype=dtype)
        added[tensor_name(site.index, "norm", layers)] = torch.ones(hidden, dtype=dtype)
    return replace(source, translation=replace(source.translation, spec=spec)), added


def house_config(translation: Translation) -> dict[str, Any]:
    """The config.json of a model in the house format.

    Raises:
        CheckpointError: the house format cannot say all of it.
    """
    spec = translation.spec
    if spec is None:
        raise CheckpointError(
            "the model has standard residuals, which the house format does not describe; add "
            "`--add-zero-queries --block-size S` to make an AttnRes model that begins as it."
        )
    options = spec.to_house()
    starts = list(spec.block_starts)
    size = (starts[1:] or [spec.num_sublayers])[0]
    if starts == list(range(0, spec.num_sublayers, size)):
        options = {"block_size": size} | {k: v for k, v in options.items() if k != "block_starts"}
    if translation.qk_norm_eps is not None:
        options[house.QK_NORM_EPS] = translation.qk_norm_eps
    own = {
        "architectures": [FAMILIES[translation.base].architecture],
        "model_type": house.PREFIX + translation.base,
        "attn_res": options,
    }
    config = own | {key: value for key, value in translation.config.items() if key not in own}
    if resolve(config) != replace(translation, format=house.NAME, config=config):
        raise CheckpointError(
            f"the house format cannot describe this model of the {translation.format} format "
            "exactly, so it cannot be converted; serve it as it is."
        )
    return config


def _refuse_renamed_quantisation(source: Source) -> None:
    rename = formats.by_name(source.translation.format).rename
    if source.config.get("quantization_config") and any(rename(n) != n for n in source.headers):
        raise CheckpointError(
            "the model is quantised, and its quantization_config names modules as the "
            f"{source.translation.format} format does; convert the model before it is quantised."
        )


def _is_tied_head(source: Source, name: str) -> bool:
    """Whether a tensor is the copy of the embedding that a tied head comes with in old files."""
    rename = formats.by_name(source.translation.format).rename
    return rename(name) == HEAD and bool(source.translation.config.get("tie_word_embeddings"))


def _check_tied(source: Source) -> None:
    """Raise unless the head of a tied model, which is not written, is the embedding."""
    rename = formats.by_name(source.translation.format).rename
    if not any(_is_tied_head(source, name) for name in source.headers):
        return
    pair = {
        rename(name): tensor.contiguous().flatten().view(torch.uint8)
        for _, name, tensor in source.tensors()
        if rename(name) in (EMBEDDING, HEAD)
    }
    if EMBEDDING not in pair or not torch.equal(pair[EMBEDDING], pair[HEAD]):
        raise CheckpointError(
            f"config.json has tie_word_embeddings: true, but {HEAD} differs from the embedding; "
            "set it to false if the model was trained with a head of its own, or remove the tensor."
        )


def _rewritten(
    source: Source,
    tensors: Iterable[tuple[Path, str, Tensor]],
    keeps_format: bool,
    added: dict[str, Tensor],
) -> Stream:
    """The source's tensors under the names they will have, and behind them those that are added."""
    module = formats.by_name(source.translation.format)
    for path, name, tensor in tensors:
        parts = list(parts_of(module, name, tuple(tensor.shape)))
        if _is_tied_head(source, name):
            continue
        if keeps_format:
            yield path, name, tensor
        elif len(parts) == 1:
            yield path, module.rename(name), tensor
        else:
            for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
                yield path, module.rename(part), piece
    for name, tensor in added.items():
        yield source.files[-1], name, tensor


def _shards(headers: dict[str, Header]) -> dict[str, dict[str, Header]]:
    """One file for every file of the source, with Hugging Face's names."""
    files = list(dict.fromkeys(header.file for header in headers.values()))
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    return {
        shard: {name: header for name, header in headers.items() if header.file == file}
        for shard, file in zip(names, files, strict=True)
    }


def _other_files(source: Source) -> tuple[list[Path], list[str]]:
    """The files that are taken over, and the names of those that are not."""
    weights_files = {path.name for path in source.files}
    known = {"config.json", INDEX, weights.PICKLE_INDEX, *weights_files}
    others = [path for path in sorted(source.folder.iterdir()) if path.name not in known]
    kept = [
        path
        for path in others
        if path.is_file()
        and path.suffix not in (*PICKLES, ".py")
        and any(path.match(pattern) for pattern in KEPT)
    ]
    return kept, [path.name for path in others if path not in kept]
