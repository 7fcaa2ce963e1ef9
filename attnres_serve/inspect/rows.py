"""The sites of a model as rows of figures and tables that no trace is drawn in."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from attnres_serve.depth.sites import Site, source_names


@dataclass(frozen=True)
class SiteRow:
    """A site that mixes.

    Attributes:
        index: its number.
        layer: None for the final site.
        kind: of the sublayer that it feeds, or ``final``.
        sources: the names of its sources.
    """

    index: int
    layer: int | None
    kind: str
    sources: list[str]


def rows_of(sites: Iterable[Site]) -> list[SiteRow]:
    """Those of a model's sites that mix, in order."""
    return [
        SiteRow(site.index, site.layer, site.kind, source_names(site))
        for site in sites
        if site.mixes
    ]


def columns(rows: list[SiteRow]) -> dict[str, list]:
    """What tables say of the sites; the final one has no layer."""
    return {
        "site": [row.index for row in rows],
        "layer": [row.layer for row in rows],
        "kind": [row.kind for row in rows],
    }


def arrays_of(rows: list[SiteRow]) -> dict[str, np.ndarray]:
    """The same as arrays; the layer of the final site is -1."""
    layers = [-1 if row.layer is None else row.layer for row in rows]
    return {name: np.array(part) for name, part in (columns(rows) | {"layer": layers}).items()}
