"""The numbers of a trace as an ``xarray.Dataset``."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres_serve.depth.sites import PARTIAL
from attnres_serve.tracing.answer import Prediction, TraceAnswer, TracedSite

if TYPE_CHECKING:
    import xarray

NONE = -1  # the layer of the final site, and the site of a sum that is the same at every site
Variables = dict[str, Any]  # by name the dimensions and the values


def dataset(trace: TraceAnswer) -> "xarray.Dataset":
    """All numbers of a trace as variables, and what names them as coordinates.

    Texts are objects, ``""`` without a tokenizer: a text may end with NUL, which strings of NumPy's
    own lose.  What the most probable tokens are called is a coordinate, so arithmetic of two traces
    is of numbers alone.
    """
    import xarray  # with pandas, half a second

    shape = len(trace.sites), len(trace.tokens)
    entropy = np.array([site.entropy for site in trace.sites], float).reshape(shape)
    variables: Variables = {
        "weights": (("site", "token", "source"), _by_source(trace, "weights")),
        "rms": (("site", "token", "source"), _by_source(trace, "rms")),
        "entropy": (("site", "token"), entropy),
    }
    layers = [NONE if site.layer is None else site.layer for site in trace.sites]
    coordinates: Variables = {
        "site": [site.index for site in trace.sites],
        "token": [token.position for token in trace.tokens],
        "source": _sources(trace.sites),
        "layer": ("site", layers),
        "kind": ("site", [site.kind for site in trace.sites]),
        "token_id": ("token", [token.id for token in trace.tokens]),
        "token_text": ("token", np.array([token.text or "" for token in trace.tokens], object)),
    }
    if trace.logprobs is not None:
        runs = {"": trace.logprobs.unedited}
        if trace.logprobs.edited is not None:
            runs = {"": trace.logprobs.edited, "unedited_": trace.logprobs.unedited}
        for prefix, rows in runs.items():
            numbers, names = _predicted(prefix, ("token",), shape[1:], "rank", rows)
            variables |= numbers
            coordinates |= names
    if trace.lens is not None:
        every = [row for reading in trace.lens for row in reading.predictions]
        shape = len(trace.lens), len(trace.tokens)
        numbers, names = _predicted("lens_", ("vector", "token"), shape, "lens_rank", every)
        variables |= numbers
        coordinates |= names | {
            "vector": [
                reading.vector if reading.site is None else f"site {reading.site} {reading.vector}"
                for reading in trace.lens
            ],
            "vector_site": (
                "vector",
                [NONE if reading.site is None else reading.site for reading in trace.lens],
            ),
            "vector_name": ("vector", [reading.vector for reading in trace.lens]),
        }
    return xarray.Dataset(variables, coordinates, _facts(trace))


def _facts(trace: TraceAnswer) -> dict[str, Any]:
    """What is true of the whole trace; the edits are JSON, as they were asked for."""
    edits = [edit.model_dump(exclude_none=True) for edit in trace.edits]
    return {
        "model": trace.model,
        "prompt_tokens": trace.prompt_tokens,
        "total_tokens": trace.total_tokens,
        "edits": json.dumps(edits),
    }


def _sources(sites: Sequence[TracedSite]) -> list[str]:
    """The names of all sources, the partial sum last as at every site."""
    names = dict.fromkeys(name for site in sites for name in site.sources)
    return sorted(names, key=PARTIAL.__eq__)


def _by_source(trace: TraceAnswer, name: str) -> np.ndarray:
    """The rows of every site's own sources, ``[sites, tokens, sources]``, NaN where it has none."""
    columns = {source: number for number, source in enumerate(_sources(trace.sites))}
    table = np.full((len(trace.sites), len(trace.tokens), len(columns)), np.nan)
    for number, site in enumerate(trace.sites):
        for source, column in zip(site.sources, np.array(getattr(site, name)).T, strict=False):
            table[number, :, columns[source]] = column
    return table


def _predicted(
    prefix: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    rank: str,
    rows: Sequence[Prediction],
) -> tuple[Variables, Variables]:
    """What follows: logprobs as variables, and the most probable tokens as coordinates.

    Args:
        prefix: of the names.
        axes, shape: of the rows.
        rank: the dimension of the most probable tokens.
        rows: in order.
    """
    top = [token for row in rows for token in row.top]
    count = len(rows[0].top) if rows else 0
    ranked, full = (*axes, rank), (*shape, count)
    following = np.array([row.next for row in rows], float)
    ids = np.array([token.id for token in top], np.int64)
    texts = np.array([token.text or "" for token in top], object)
    logprobs = np.array([token.logprob for token in top], float)
    numbers = {
        f"{prefix}next": (axes, following.reshape(shape)),
        f"{prefix}top_logprob": (ranked, logprobs.reshape(full)),
    }
    names = {
        rank: list(range(count)),
        f"{prefix}top_id": (ranked, ids.reshape(full)),
        f"{prefix}top_text": (ranked, texts.reshape(full)),
    }
    return numbers, names
