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

NONE = -1  # layer of the final site, and id of a missing token
BLANK = {"next": np.nan, "top_logprob": np.nan, "top_id": NONE, "top_text": ""}
Variables = dict[str, Any]  # dimensions and values by name


def dataset(trace: TraceAnswer) -> "xarray.Dataset":
    """All numbers of a trace as variables, and their labels as coordinates.

    Texts are objects, ``""`` without a tokenizer: a text may end with NUL, which NumPy's strings
    drop.  The names of the most probable tokens are coordinates, so that arithmetic of two traces
    uses numbers only.
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
    """Attributes of the whole trace; the edits are JSON, as requested."""
    edits = [edit.model_dump(exclude_none=True) for edit in trace.edits]
    return {
        "model": trace.model,
        "prompt_tokens": trace.prompt_tokens,
        "total_tokens": trace.total_tokens,
        "edits": json.dumps(edits),
    }


def sources_of(sites: Sequence[ReadingSite]) -> list[str]:
    """The names of all sources, the partial sum last."""
    names = dict.fromkeys(name for site in sites for name in site.sources)
    return sorted(names, key=PARTIAL.__eq__)


def _by_source(trace: TraceAnswer, name: str) -> np.ndarray:
    """The numbers ``[sites, tokens, sources]`` by source, NaN for sources that a site lacks."""
    columns = {source: number for number, source in enumerate(sources_of(trace.sites))}
    table = np.full((len(trace.sites), len(trace.tokens), len(columns)), np.nan)
    for number, site in enumerate(trace.sites):
        for source, column in zip(site.sources, np.array(getattr(site, name)).T, strict=False):
            table[number, :, columns[source]] = column
    return table


def _lens(trace: TraceAnswer) -> tuple[Variables, Variables]:
    """Predictions from each source of a site and from its mix, blank for sources that it lacks.

    ``TraceAnswer`` has a reading that is equal at all sites once; here every site has it.
    """
    readings, sources = trace.lens or [], sources_of(trace.sites)
    rows = [row for reading in readings for row in reading.predictions]
    predicted = _predicted(rows, (len(readings), len(trace.tokens)))
    for name, array in predicted.items():
        blank = np.full((1, *array.shape[1:]), BLANK[name], array.dtype)
        predicted[name] = np.concatenate([array, blank])
    places = {(reading.site, reading.vector): at for at, reading in enumerate(readings)}

    def place(site: TracedSite, vector: str) -> int:
        if vector != WHOLE and vector not in site.sources:
            return -1
        return places.get((site.index if vector in (WHOLE, PARTIAL) else None, vector), -1)

    mixes = np.array([place(site, WHOLE) for site in trace.sites], int)
    each = np.array([[place(site, name) for name in sources] for site in trace.sites], int)
    each = each.reshape(len(trace.sites), len(sources))
    of_sources = {name: np.moveaxis(array[each], 1, 2) for name, array in predicted.items()}
    of_mixes = {name: array[mixes] for name, array in predicted.items()}
    numbers, names = _named("lens_", ("site", "token", "source"), "lens_rank", of_sources)
    more, others = _named("lens_mix_", ("site", "token"), "lens_rank", of_mixes)
    return numbers | more, names | others


def _predicted(rows: Sequence[Prediction], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The logprob of the next token ``[*shape]``, and three arrays ``[*shape, ranks]`` of the most
    probable tokens.

    Args:
        rows: the predictions in order.
        shape: the shape of the array of rows.
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
    prefix: str, axes: tuple[str, ...], rank: str, predicted: dict[str, np.ndarray]
) -> tuple[Variables, Variables]:
    """The logprobs of ``_predicted`` as variables, and the most probable tokens as coordinates."""
    ranked = (*axes, rank)
    numbers = {
        f"{prefix}next": (axes, predicted["next"]),
        f"{prefix}top_logprob": (ranked, predicted["top_logprob"]),
    }
    names = {
        rank: list(range(predicted["top_id"].shape[-1])),
        f"{prefix}top_id": (ranked, predicted["top_id"]),
        f"{prefix}top_text": (ranked, predicted["top_text"]),
    }
    return numbers, names
