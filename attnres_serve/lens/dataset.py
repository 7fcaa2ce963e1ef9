"""The numbers of a trace as an ``xarray.Dataset``."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres_serve.depth.sites import PARTIAL
from attnres_serve.tracing.answer import Prediction, ReadingSite, TraceAnswer, TracedSite
from attnres_serve.tracing.readings import WHOLE

if TYPE_CHECKING:
    import xarray

NONE = -1  # the layer of the final site, and the id of no token
BLANK = {"next": np.nan, "top_logprob": np.nan, "top_id": NONE, "top_text": ""}
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
        "source": sources_of(trace.sites),
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
            numbers, names = _named(prefix, ("token",), "rank", _predicted(rows, shape[1:]))
            variables |= numbers
            coordinates |= names
    if trace.lens is not None:
        numbers, names = _lens(trace)
        variables |= numbers
        coordinates |= names
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


def sources_of(sites: Sequence[ReadingSite]) -> list[str]:
    """The names of all sources, the partial sum last as at every site."""
    names = dict.fromkeys(name for site in sites for name in site.sources)
    return sorted(names, key=PARTIAL.__eq__)


def _by_source(trace: TraceAnswer, name: str) -> np.ndarray:
    """The rows of every site's own sources, ``[sites, tokens, sources]``, NaN where it has none."""
    columns = {source: number for number, source in enumerate(sources_of(trace.sites))}
    table = np.full((len(trace.sites), len(trace.tokens), len(columns)), np.nan)
    for number, site in enumerate(trace.sites):
        for source, column in zip(site.sources, np.array(getattr(site, name)).T, strict=False):
            table[number, :, columns[source]] = column
    return table


def _lens(trace: TraceAnswer) -> tuple[Variables, Variables]:
    """What each source of a site and the site's mix would predict, blank where a site has none.

    The answer has a reading that is the same at every site once; here it is at every site that has
    the source.
    """
    readings, sources = trace.lens or [], sources_of(trace.sites)
    rows = [row for reading in readings for row in reading.predictions]
    found = _predicted(rows, (len(readings), len(trace.tokens)))
    for name, array in found.items():
        blank = np.full((1, *array.shape[1:]), BLANK[name], array.dtype)
        found[name] = np.concatenate([array, blank])
    places = {(reading.site, reading.vector): at for at, reading in enumerate(readings)}

    def place(site: TracedSite, vector: str) -> int:
        if vector != WHOLE and vector not in site.sources:
            return -1
        return places.get((site.index if vector in (WHOLE, PARTIAL) else None, vector), -1)

    mixes = np.array([place(site, WHOLE) for site in trace.sites], int)
    each = np.array([[place(site, name) for name in sources] for site in trace.sites], int)
    each = each.reshape(len(trace.sites), len(sources))
    of_sources = {name: np.moveaxis(array[each], 1, 2) for name, array in found.items()}
    of_mixes = {name: array[mixes] for name, array in found.items()}
    numbers, names = _named("lens_", ("site", "token", "source"), "lens_rank", of_sources)
    more, others = _named("lens_mix_", ("site", "token"), "lens_rank", of_mixes)
    return numbers | more, names | others


def _predicted(rows: Sequence[Prediction], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """What follows: a logprob of ``[*shape]``, and three arrays ``[*shape, ranks]`` of the most
    probable tokens.

    Args:
        rows: in order.
        shape: of the rows.
    """
    top = [token for row in rows for token in row.top]
    full = (*shape, len(rows[0].top) if rows else 0)
    following = np.array([row.next for row in rows], float)
    return {
        "next": following.reshape(shape),
        "top_logprob": np.array([token.logprob for token in top], float).reshape(full),
        "top_id": np.array([token.id for token in top], np.int64).reshape(full),
        "top_text": np.array([token.text or "" for token in top], object).reshape(full),
    }


def _named(
    prefix: str, axes: tuple[str, ...], rank: str, found: dict[str, np.ndarray]
) -> tuple[Variables, Variables]:
    """The logprobs of ``_predicted`` as variables, and the most probable tokens as coordinates."""
    ranked = (*axes, rank)
    numbers = {
        f"{prefix}next": (axes, found["next"]),
        f"{prefix}top_logprob": (ranked, found["top_logprob"]),
    }
    names = {
        rank: list(range(found["top_id"].shape[-1])),
        f"{prefix}top_id": (ranked, found["top_id"]),
        f"{prefix}top_text": (ranked, found["top_text"]),
    }
    return numbers, names
