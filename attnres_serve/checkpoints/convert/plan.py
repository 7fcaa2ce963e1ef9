"""The plan of ``attnres-serve convert``, from names, shapes and types alone.

The planned checkpoint is checked by the rules for serving before a byte is written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve.checkpoints import read as weights
from attnres_serve.checkpoints.checked import Checkpoint, check_content
from attnres_serve.checkpoints.convert.source import Source, Stream
from attnres_serve.checkpoints.edited import edited_tensors
from attnres_serve.checkpoints.files import INDEX, Header
from attnres_serve.checkpoints.names import site_of, tensor_name
from attnres_serve.checkpoints.other_files import PICKLES
from attnres_serve.checkpoints.write import shards
from attnres_serve.depth import static_edits
from attnres_serve.depth.edits import Edit
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import EDITS, AttnResSpec
from attnres_serve.depth.static_edits import SiteEdit
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import EMBEDDINGS
from attnres_serve.formats import house
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.resolve import resolve

# Copied unchanged.
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
    # Never run here; it states how to read the vocabulary.
    TOKENIZER_CODE := "tokenization_*.py",
)


@dataclass(frozen=True)
class Plan:
    """The files to write.

    Attributes:
        source: the checkpoint to convert.
        keeps_format: whether names and config.json stay the same.
        added: new tensors, by their house names.
        edits: edits to write into the sites, by their indices; None without edits.
        result: the resulting checkpoint.
        shards: the tensors of every file of weights, by the file's name.
        kept: files of the source that are copied unchanged.
        left: names of files that are not copied.
    """

    source: Source
    keeps_format: bool
    added: dict[str, Tensor]
    edits: dict[int, SiteEdit] | None
    result: Checkpoint
    shards: dict[str, dict[str, Header]]
    kept: list[Path]
    left: list[str]

    @property
    def size(self) -> int:
        """Bytes to write, without config.json and headers."""
        tensors = sum(header.stored_bytes for header in self.result.headers.values())
        return tensors + sum(path.stat().st_size for path in self.kept)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of ``shards``."""
        known = self.keeps_format, self.added, self.edits
        stream = _rewritten(self.source, self.source.tensors(), *known)
        return ((name, tensor) for _, name, tensor in stream)


def make_plan(
    source: Source, to_house: bool, block_size: int | None, edits: Sequence[Edit] = ()
) -> Plan:
    """Plan a conversion and check its result.

    Args:
        source: the checkpoint to convert.
        to_house: whether to write the house format; otherwise pickles become safetensors.
        block_size: sublayers per block of the queries to add; None adds none.
        edits: edits of what sites read, at every token; the result is then in the house format.

    Raises:
        CheckpointError: nothing would change, or the result could not be served exactly.
        SettingError: an edit is impossible.
    """
    added: dict[str, Tensor] = {}
    if block_size is not None:
        source, added = _with_zero_queries(source, block_size)
    elif (to_house or edits) and source.parsed.spec and source.format.lacks_first_site:
        added = _zero_queries(source, [0])
    resolved = static_edits.resolve(edits, source.parsed.spec) if edits else None
    keeps_format = (
        not edits and block_size is None and (not to_house or source.parsed.format == house.NAME)
    )
    if keeps_format and not (source.has_pickles or source.names or source.has_new_config):
        mend = "" if source.parsed.format == house.NAME else "; did you mean `--to house`?"
        raise CheckpointError(
            f"{source.folder} is in safetensors already, in the {source.parsed.format} format"
            f"{mend or '.'}"
        )
    parsed = source.parsed
    if resolved is not None and parsed.spec is not None:  # a query for each site
        biased = replace(parsed.spec, source_bias=True, recency_bias=False, shared_queries=None)
        parsed = replace(parsed, spec=biased)
    config = source.config if keeps_format else house_config(parsed)
    if edits:  # after those that it has
        before = source.config[house.KEY] if source.parsed.format == house.NAME else {}
        config[house.KEY][EDITS] = [*before.get(EDITS, ()), *static_edits.to_json(edits)]
    if not keeps_format:
        _refuse_renamed_quantisation(source)
    source.check_tied_head()
    stream = _rewritten(source, source.without_values(), keeps_format, added, resolved)
    headers = {name: weights.header(name, tensor, path) for path, name, tensor in stream}
    result = check_content(config, lambda: headers)
    kept, left = _other_files(source)
    return Plan(source, keeps_format, added, resolved, result, shards(headers), kept, left)


def _with_zero_queries(source: Source, block_size: int) -> tuple[Source, dict[str, Tensor]]:
    """An AttnRes model that starts equal to a standard model, and the tensors to add.

    Zero queries make every mix a plain mean. The norm after it removes the scale, up to its eps.
    """
    config = source.parsed.config
    eps = FAMILIES[source.parsed.family].epsilon(config)
    spec = AttnResSpec.uniform(source.parsed.layout, block_size, eps)
    added = _zero_queries(source, [site.index for site in sites(spec)])
    return replace(source, parsed=replace(source.parsed, spec=spec)), added


def _zero_queries(source: Source, places: list[int]) -> dict[str, Tensor]:
    """Zero queries and unit key norms of sites, by house names, in the embedding's dtype."""
    layout, hidden = source.parsed.layout, source.parsed.config["hidden_size"]
    stored = source.index.stored
    dtypes = [stored[name].dtype for name in EMBEDDINGS if name in stored]
    if not dtypes:
        raise CheckpointError(f"{source.folder} lacks its embedding.")
    dtype = weights.TORCH_DTYPES[dtypes[0]]
    added: dict[str, Tensor] = {}
    for place in places:
        added[tensor_name(place, "proj", layout)] = torch.zeros((1, hidden), dtype=dtype)
        added[tensor_name(place, "norm", layout)] = torch.ones(hidden, dtype=dtype)
    return added


def house_config(parsed: ParsedConfig) -> dict[str, Any]:
    """The config.json of a model in the house format.

    Raises:
        CheckpointError: the house format cannot describe the model.
    """
    spec = parsed.spec
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
    family = FAMILIES[parsed.family]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attn_res": options,
    }
    if parsed.qk_norm_eps is not None:
        config["qk_norm_eps"] = parsed.qk_norm_eps
    stated = _family_keys(parsed.config)
    config |= stated
    reparsed = resolve(config)
    same = reparsed and replace(reparsed, format=parsed.format, config=parsed.config)
    if reparsed is None or same != parsed or _family_keys(reparsed.config) != stated:
        raise CheckpointError(
            f"the house format cannot describe this model of the {parsed.format} format "
            "exactly, so it cannot be converted; serve it as it is."
        )
    return config


def _family_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The family's part of a config.json."""
    added_keys = ("architectures", "model_type", "attn_res", "qk_norm_eps")
    return {key: value for key, value in config.items() if key not in added_keys}


def _refuse_renamed_quantisation(source: Source) -> None:
    rename = source.format.rename
    if source.config.get("quantization_config") and any(rename(n) != n for n in source.headers):
        raise CheckpointError(
            "the model is quantised, and its quantization_config names modules as the "
            f"{source.parsed.format} format does; convert the model before it is quantised."
        )


def _rewritten(
    source: Source,
    tensors: Iterable[tuple[Path, str, Tensor]],
    keeps_format: bool,
    added: dict[str, Tensor],
    edits: Mapping[int, SiteEdit] | None,
) -> Stream:
    """The source's tensors under their new names, then the added ones.

    With edits, the tensors of sites come last too, separate for each site.
    """
    layout = source.parsed.layout
    learned: dict[str, Tensor] = {}
    if keeps_format:
        yield from (entry for entry in tensors if not source.is_tied_head(entry[1]))
    else:
        for path, name, tensor in source.in_house_names(tensors):
            site = site_of(name, layout)
            is_query = site is not None and site[1] == "proj"
            if site is not None and edits is not None:
                learned[name] = tensor
                continue
            yield path, name, tensor.reshape(1, -1) if is_query else tensor
    if edits is not None:
        assert source.parsed.spec is not None
        added = edited_tensors(source.parsed.spec, learned | added, edits)
    for name, tensor in added.items():
        yield source.files[-1], name, tensor


def _other_files(source: Source) -> tuple[list[Path], list[str]]:
    """The files to copy, and the names of those that are not copied."""
    weights_files = {path.name for path in source.files}
    known = {"config.json", INDEX, weights.PICKLE_INDEX, *weights_files}
    others = [path for path in sorted(source.folder.iterdir()) if path.name not in known]
    kept = [
        path
        for path in others
        if path.is_file()
        and (path.suffix not in (*PICKLES, ".py") or path.match(TOKENIZER_CODE))
        and any(path.match(pattern) for pattern in KEPT)
    ]
    return kept, [path.name for path in others if path not in kept]
