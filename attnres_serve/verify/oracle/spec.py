"""The specification of a model, independent of formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from attnres_serve.verify.oracle.edits import Edit
from attnres_serve.verify.oracle.sublayers.sublayer import Sublayer


class Place(NamedTuple):
    """The layer and the kind of a sublayer."""

    layer: int
    kind: str


Layout = tuple[Place, ...]


@dataclass
class Spec:
    """The specification of a model, independent of formats.

    Attributes:
        names: the format's names of tensors. A kind ``k`` of sublayers has ``k``, the prefix of the
            names of its tensors, and ``k_norm``, with Attention Residuals also ``k_query`` and
            ``k_key``.
        layout: every sublayer in the order in which they run.
        sublayers: the object that computes a kind, by kind.
        leaves: the format's names of linears that differ from Hugging Face's.
        block_starts: numbers of sublayers; None: standard residuals.
        shared_queries: "layer" or "block": the sites of one share a query.
        embedding_scale: the factor of embeddings.
        unread: tensors that the checkpoint may have and that nothing reads.
        edits: the edits by site.
    """

    names: dict[str, str]
    layout: Layout
    sublayers: dict[str, Sublayer]
    hidden: int
    vocab: int
    eps: float
    tied: bool
    leaves: dict[str, str] = field(default_factory=dict)
    block_starts: tuple[int, ...] | None = None
    final_mix: bool = True
    key_norm_eps: float = 0.0
    cumulative: bool = False
    recency_bias: bool = False
    source_bias: bool = False
    logit_scale: float = 1.0
    shared_queries: str | None = None
    embedding_scale: float = 1.0
    unread: tuple[str, ...] = ()
    edits: Mapping[int, Sequence[Edit]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return len({place.layer for place in self.layout})

    @property
    def final(self) -> int:
        """The number of the site after the last sublayer."""
        return len(self.layout)

    @property
    def starts(self) -> tuple[int, ...]:
        """The block starts of a model that has blocks."""
        assert self.block_starts is not None
        return self.block_starts

    def tensor_name(self, place: Place, leaf: str) -> str:
        """The checkpoint's name of a tensor of a sublayer, such as ``q_proj.weight``."""
        linear, dot, last = leaf.rpartition(".")
        stored = self.leaves.get(linear, linear)
        return self.names[place.kind].format(place.layer) + stored + dot + last


def alike(layers: int, kinds: Sequence[str]) -> Layout:
    """The layout of a model with these sublayers in every layer."""
    return tuple(Place(layer, kind) for layer in range(layers) for kind in kinds)


def starts_of(block_size: int, sublayers: int) -> tuple[int, ...]:
    """Block starts 0, S, 2S, ... of blocks of S sublayers."""
    if block_size < 1:
        raise ValueError(f"block size must be positive, not {block_size}")
    return tuple(range(0, sublayers, block_size))


def starts_by_layers(block_layers: int, layout: Layout) -> tuple[int, ...]:
    """Block starts of blocks of so many layers."""
    layers = len({place.layer for place in layout})
    return tuple(first_site(layout, layer) for layer in starts_of(block_layers, layers))


def first_site(layout: Layout, layer: int) -> int:
    """The number of the first sublayer of a layer."""
    return next(site for site, place in enumerate(layout) if place.layer == layer)


def check_starts(starts: Sequence[int], sublayers: int, closes: bool = False) -> tuple[int, ...]:
    """`starts` as a tuple, or a ValueError: they must rise from 0 and stay below `sublayers`.

    With `closes` the last may be `sublayers`: a copy that only the final site reads.
    """
    starts = tuple(starts)
    rising = all(a < b for a, b in pairwise(starts))
    if not starts or starts[0] != 0 or not rising or starts[-1] >= sublayers + closes:
        raise ValueError(f"bad block starts {starts} for {sublayers} sublayers")
    return starts


def source_spans(starts: Sequence[int], site: int) -> list[tuple[int, int]]:
    """Spans [b, e) of the sublayers in each block that `site` can see, oldest first."""
    ends = [*starts[1:], site]
    return [(b, min(e, site)) for b, e in zip(starts, ends, strict=True) if b < site]


def site_role(spec: Spec, site: int) -> tuple[str, int | None]:
    """The role and the layer of the stored query and key norm of `site`."""
    if site == spec.final:
        return "final", None
    if spec.shared_queries == "layer":
        site = first_site(spec.layout, spec.layout[site].layer)
    elif spec.shared_queries == "block":
        site = max(start for start in spec.starts if start <= site)
    return spec.layout[site].kind, spec.layout[site].layer
