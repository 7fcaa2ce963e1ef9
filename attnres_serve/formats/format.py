"""What a checkpoint format states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import Any, NamedTuple

from attnres_serve.compat.native import Native
from attnres_serve.formats.parsed_config import ParsedConfig

UNREAD = "unread."  # the prefix that ``rename`` gives to tensors that the format's code never reads


class Blocks(NamedTuple):
    """The way in which a format states its blocks.

    Attributes:
        key: a key of config.json, at its top or in an object of the format.
        unit: the unit of its number: the ``sublayers`` or ``layers`` of a block, or the ``blocks``.
    """

    key: str
    unit: str


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: its name in logs and in ``GET /v1/attn_res``.
        blocks: how it states where blocks begin.
        matches: whether a config.json is of this format, decided by model_type, architectures and
            keys together, never by one key alone.
        translate: the family, its Hugging Face config and the AttnRes specification of a
            config.json; it raises CheckpointError for AttnRes that cannot be served exactly.
        rename: a tensor's name in the house format: the family's names plus Kimi's.
        stored_name: the name in this format of the tensor that holds a weight, by its house name.
        fused_parts: names, for ``rename``, of the equal parts that a tensor holds one after the
            other along dimension 0; the name itself for a tensor that is not fused.
        mark: a pattern of tensor names that only this one has, of formats that match the same
            config.json.
        distinct_key: a key of config.json that only this one writes, of those formats.
        lacks_first_site: whether it stores nothing for site 0, which has only one source.
        native: the evidence of a vLLM that serves the format by itself.
        layer_names_of: what a sentence calls a format whose linear layers have other names than
            the family's.  LoRA adapters name layers as the family does.
    """

    name: str
    blocks: Blocks
    matches: Callable[[dict[str, Any]], bool]
    translate: Callable[[dict[str, Any]], ParsedConfig]
    rename: Callable[[str], str]
    stored_name: Callable[[str], str]
    fused_parts: Callable[[str], Sequence[str]] = lambda name: (name,)
    mark: Pattern[str] | None = None
    distinct_key: str | None = None
    lacks_first_site: bool = False
    native: Native | None = None
    layer_names_of: str | None = None
