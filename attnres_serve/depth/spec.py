"""AttnResSpec: the normalised description of a model's depth attention.

Whatever unit or convention a checkpoint format uses, its AttnRes settings become one of these.
Sublayers are numbered from 0 in the order in which they run, as in arXiv 2603.15031.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from math import isfinite
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.errors import CheckpointError

EDITS = "edits"  # key of the edits that were written into the weights of a checkpoint
SHARED_QUERIES = ("layer", "block")


@dataclass(frozen=True)
class AttnResSpec:
    """Depth attention of one model.

    Attributes:
        layout: the decoder's sublayers.
        block_starts: ascending sublayers at which a new block begins; the first is 0, so the
            token embedding is always a finished block by itself.  A cumulative model with a final
            mix may begin one after its last sublayer: the final site then reads the sum and its
            copy.
        key_norm_eps: epsilon of the RMSNorm over keys.
        final_mix: whether the last norm reads a mix of all sources; otherwise it reads the
            running partial sum.
        cumulative: whether the partial sum goes on where a block begins, the finished block being
            a copy of it; otherwise it begins anew.  A cumulative sum begins with the embedding.
        recency_bias: whether every site adds a learned scalar to the score of its last source,
            which is the partial sum or, where that has just begun anew, the last block.
        logit_scale: what the product of query and key is multiplied by (1/T for a temperature T).
        shared_queries: "layer" or "block" if the sites of a layer, or of a block's sublayers,
            share one query, key norm and bias; the final site never shares them.
        source_bias: whether every site adds a learned number to the score of each of its sources.

    Raises:
        CheckpointError: a value cannot describe a model.
    """

    layout: Layout
    block_starts: tuple[int, ...]
    key_norm_eps: float
    final_mix: bool = True
    cumulative: bool = False
    recency_bias: bool = False
    logit_scale: float = 1.0
    shared_queries: str | None = None
    source_bias: bool = False

    def __post_init__(self) -> None:
        starts = self.block_starts
        if not starts or not all(type(s) is int for s in starts) or starts[0] != 0:
            raise CheckpointError(
                f"attn_res.block_starts is {list(starts)!r}; expected whole sublayer numbers "
                "that begin with 0."
            )
        if any(a >= b for a, b in pairwise(starts)):
            raise CheckpointError(
                f"attn_res.block_starts is {list(starts)!r}; expected ascending numbers "
                "without repetition."
            )
        closes = self.cumulative and self.final_mix
        if starts[-1] >= self.num_sublayers + (closes is True):
            raise CheckpointError(
                f"attn_res.block_starts ends with {starts[-1]}, but the model has only "
                f"{self.num_sublayers} sublayers (numbered from 0); remove the starts behind it."
            )
        for key in ("final_mix", "cumulative", "recency_bias", "source_bias"):
            if type(getattr(self, key)) is not bool:
                raise CheckpointError(
                    f"attn_res.{key} is {getattr(self, key)!r}; expected true or false."
                )
        for key in ("key_norm_eps", "logit_scale"):
            value = getattr(self, key)
            if not is_number(value) or value <= 0:
                raise CheckpointError(f"attn_res.{key} is {value!r}; expected a positive number.")
        if self.shared_queries not in (None, *SHARED_QUERIES):
            raise CheckpointError(
                f"attn_res.shared_queries is {self.shared_queries!r}; expected null, "
                f"{' or '.join(map(repr, SHARED_QUERIES))}."
            )

        if self.source_bias and (self.recency_bias or self.shared_queries is not None):
            raise CheckpointError(
                "attn_res has source_bias and besides "
                f"{'recency_bias' if self.recency_bias else 'shared_queries'}; choose one of them."
            )

    @property
    def has_biases(self) -> bool:
        """Whether sites add learned numbers to the scores of their sources."""
        return self.recency_bias or self.source_bias

    @property
    def num_sublayers(self) -> int:
        return self.layout.num_sublayers

    @property
    def num_blocks(self) -> int:
        """Blocks of sublayers; the embedding is not counted."""
        return len(self.first_sublayers)

    @property
    def first_sublayers(self) -> tuple[int, ...]:
        """The first sublayer of every block: the starts up to the last sublayer."""
        return tuple(start for start in self.block_starts if start < self.num_sublayers)

    @property
    def is_full(self) -> bool:
        """Whether every sublayer is a block: Full AttnRes."""
        return self.num_blocks == self.num_sublayers

    @classmethod
    def uniform(
        cls,
        layout: Layout,
        block_size: int,
        key_norm_eps: float,
        final_mix: bool = True,
        **options: Any,
    ) -> "AttnResSpec":
        """Blocks of ``block_size`` sublayers; the last one takes what remains."""
        if not is_count(block_size):
            raise CheckpointError(
                f"the block size is {block_size!r}; expected a whole number of at least 1, "
                "counted in sublayers (1 is Full AttnRes)."
            )
        starts = tuple(range(0, layout.num_sublayers, block_size))
        return cls(layout, starts, key_norm_eps, final_mix, **options)

    @classmethod
    def by_layers(
        cls,
        layout: Layout,
        block_layers: int,
        key_norm_eps: float,
        final_mix: bool = True,
        **options: Any,
    ) -> "AttnResSpec":
        """Blocks of ``block_layers`` layers, at least 1; the last one takes what remains."""
        starts = layout.layer_starts[::block_layers]
        return cls(layout, starts, key_norm_eps, final_mix, **options)

    @classmethod
    def from_house(cls, attn_res: Any, layout: Layout, rms_norm_eps: Any) -> "AttnResSpec":
        """Read the ``attn_res`` dictionary of the house format; unknown keys are an error."""
        if not isinstance(attn_res, dict):
            raise CheckpointError(
                f"attn_res is {attn_res!r}; expected an object such as {{'block_size': 4}}."
            )
        unknown = sorted(set(attn_res) - {"block_size", EDITS, *HOUSE_KEYS})
        if unknown:
            raise CheckpointError(
                f"attn_res has the unknown key {unknown[0]!r}; the known ones are block_size, "
                f"{', '.join(HOUSE_KEYS)}."
            )
        if ("block_size" in attn_res) == ("block_starts" in attn_res):
            raise CheckpointError(
                "attn_res must have exactly one of block_size (in sublayers) and block_starts; "
                f"found {sorted(attn_res)}."
            )
        options = {"key_norm_eps": rms_norm_eps, **attn_res}
        options.pop(EDITS, None)
        if "block_size" in attn_res:
            return cls.uniform(layout, **options)
        starts = options.pop("block_starts")
        if not isinstance(starts, (list, tuple)):
            raise CheckpointError(
                f"attn_res.block_starts is {starts!r}; expected a list of sublayer numbers."
            )
        return cls(layout, tuple(starts), **options)

    def to_house(self) -> dict[str, Any]:
        """The ``attn_res`` dictionary of the house format, without default values."""
        house = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in HOUSE_KEYS and getattr(self, field.name) != field.default
        }
        return house | {"block_starts": list(self.block_starts)}


HOUSE_KEYS = tuple(field.name for field in fields(AttnResSpec) if field.name != "layout")


def is_count(value: Any) -> bool:
    """A positive whole number (True is not one)."""
    return type(value) is int and value >= 1


def is_number(value: Any) -> bool:
    """A finite number (Python's JSON reader knows NaN and Infinity)."""
    return type(value) is int or (type(value) is float and isfinite(value))
