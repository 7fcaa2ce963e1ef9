"""The sites of a specification: the sources of each site, and where blocks open.

A site is a place where sources are mixed.  Site s feeds sublayer s; the final site, after the
last sublayer, feeds the last norm.  Site s receives the output of sublayer s-1, adds it to the
running partial sum and, where a block starts, moves that sum to the finished blocks before it
reads.  (The paper's "read, then close" exposes the same sources in the same order.)  In a
cumulative model the sum is copied there instead and goes on.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from attnres_serve.depth.layout import FINAL, site_name
from attnres_serve.depth.spec import AttnResSpec

PARTIAL = "partial"  # name of the source that is the running sum


@dataclass(frozen=True)
class Site:
    """One site, described by static numbers only, so that graphs have static shapes.

    Attributes:
        index: the number of the sublayer that it feeds; for the final site, that of sublayers.
        layer: the layer of that sublayer, None for the final site.
        kind: the kind of that sublayer, ``final`` for the final site.
        norm: path of the norm that reads the site below the decoder.
        opens_block: whether the partial sum it receives becomes a finished block.
        num_blocks: finished blocks it reads, the embedding among them.
        reads_partial: whether it reads a partial sum besides.
        mixes: False only for the final site of a model whose last norm reads the partial sum.
        cumulative: whether the partial sum goes on where a block opens.
        tensors: index of the site whose names its query and key norm are stored under; its index
            unless sites share them.
    """

    index: int
    layer: int | None
    kind: str
    norm: str
    opens_block: bool
    num_blocks: int
    reads_partial: bool
    mixes: bool
    cumulative: bool
    tensors: int

    @property
    def num_sources(self) -> int:
        return self.num_blocks + self.reads_partial

    @property
    def sources(self) -> list[str]:
        """The names of its sources, in the order in which it reads them."""
        blocks = [f"block {number}" for number in range(1, self.num_blocks)]
        return ["embedding", *blocks, *([PARTIAL] if self.reads_partial else [])]

    @property
    def name(self) -> str:
        """Its readable name, for example ``the attention of layer 3``."""
        return site_name(self.kind, self.layer)


def sites(spec: AttnResSpec) -> tuple[Site, ...]:
    """All sites of a model, in the order in which they run."""
    final, layout = spec.num_sublayers, spec.layout
    places: list[tuple[int | None, str, str]] = [
        (sublayer.layer, sublayer.kind, sublayer.norm) for sublayer in layout.sublayers
    ]
    places.append((None, FINAL, layout.final_norm))
    starts = (*spec.block_starts, final + 1)
    result = []
    for number, (start, end) in enumerate(pairwise(starts), 1):
        result += [
            Site(
                index,
                *places[index],
                opens_block=index == start,
                num_blocks=number,
                reads_partial=spec.cumulative or index != start,
                mixes=spec.final_mix or index != final,
                cumulative=spec.cumulative,
                tensors=_first_that_shares(index, start, spec),
            )
            for index in range(start, end)
        ]
    return tuple(result)


def _first_that_shares(index: int, block_start: int, spec: AttnResSpec) -> int:
    if index == spec.num_sublayers or spec.shared_queries is None:
        return index
    if spec.shared_queries == "block":
        return block_start
    starts = spec.layout.layer_starts
    return starts[bisect_right(starts, index) - 1]
