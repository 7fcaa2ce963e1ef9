"""What ``attnres-serve convert`` will write, planned from names, shapes and types alone.

The plan is checked as the checkpoint that it will be, by the same rules as for serving, before a
byte is written.
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
from attnres_serve.checkpoints.files import INDEX, PICKLES, Header
from attnres_serve.checkpoints.names import lacks_first_site, site_of, tensor_name
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
    # It is never run here, and tells how the vocabulary is to be read.
    TOKENIZER_CODE := "tokenization_*.py",
)


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        source: what it is made from.
        keeps_format: whether names and config.json stay as the source has them.
        added: tensors that the source has not, by their house names.
        edits: what is written into the sites, by their indices; None for no edits.
        result: the checkpoint that it will be.
        shards: the tensors of every file of weights, by the file's name.
        kept: files of the source that are taken over as they are.
        left: names of those that are not.
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
        """Bytes of what is written, config.json and headers left aside."""
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
    """Plan a conversion and check what will come of it.

    Args:
        source: what to convert.
        to_house: whether into the house format; otherwise pickles become safetensors.
        block_size: sublayers per block of the queries to add; None adds none.
        edits: of what sites read, at every token; with some the house format is written.

    Raises:
        CheckpointError: nothing would change, or the result could not be served exactly.
        SettingError: an edit is impossible.
    """
    added: dict[str, Tensor] = {}
    if block_size is not None:
        source, added = _with_zero_queries(source, block_size)
    elif (to_house or edits) and source.parsed.spec and lacks_first_site(source.format):
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
    if resolved is not None and parsed.spec is not None:  # each site has its own
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
    """A standard model as the AttnRes model that begins as it, and the tensors it needs for that.

    Zero queries make every mix a plain mean, whose scale the norm behind it takes away, up to its
    eps.
    """
    config = source.parsed.config
    eps = FAMILIES[source.parsed.family].epsilon(config)
    spec = AttnResSpec.uniform(source.parsed.layout, block_size, eps)
    added = _zero_queries(source, [site.index for site in sites(spec)])
    return replace(source, parsed=replace(source.parsed, spec=spec)), added


def _zero_queries(source: Source, places: list[int]) -> dict[str, Tensor]:
    """Zero queries and unit key norms of sites, by house names, in the embedding's type."""
    layout, hidden = source.parsed.layout, source.parsed.config["hidden_size"]
    stored = source.index.stored
    found = [stored[name].dtype for name in EMBEDDINGS if name in stored]
    if not found:
        raise CheckpointError(f"{source.folder} lacks its embedding.")
    dtype = weights.TORCH_DTYPES[found[0]]
    added: dict[str, Tensor] = {}
    for place in places:
        added[tensor_name(place, "proj", layout)] = torch.zeros((1, hidden), dtype=dtype)
        added[tensor_name(place, "norm", layout)] = torch.ones(hidden, dtype=dtype)
    return added


def house_config(parsed: ParsedConfig) -> dict[str, Any]:
    """The config.json of a model in the house format.

    Raises:
        CheckpointError: the house format cannot say all of it.
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
    base = _of_the_base(parsed.config)
    config |= base
    found = resolve(config)
    same = found and replace(found, format=parsed.format, config=parsed.config)
    if found is None or same != parsed or _of_the_base(found.config) != base:
        raise CheckpointError(
            f"the house format cannot describe this model of the {parsed.format} format "
            "exactly, so it cannot be converted; serve it as it is."
        )
    return config


def _of_the_base(config: dict[str, Any]) -> dict[str, Any]:
    """What of a config.json is the family's."""
    own = ("architectures", "model_type", "attn_res", "qk_norm_eps")
    return {key: value for key, value in config.items() if key not in own}


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
    """The source's tensors under the names they will have, and behind them those that are added.

    Under edits those of sites come last too, and each site has its own.
    """
    layout = source.parsed.layout
    learned: dict[str, Tensor] = {}
    if keeps_format:
        yield from (found for found in tensors if not source.is_tied_head(found[1]))
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
    """The files that are taken over, and the names of those that are not."""
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
