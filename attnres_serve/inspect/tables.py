"""The numbers of a trace as NumPy arrays, and the labels of their axes."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnres_serve.depth.sites import PARTIAL
from attnres_serve.inspect.answer import Prediction, Trace, TracedSite
from attnres_serve.inspect.labelled import Array, Label

RANKS = ("rank", "lens_rank")  # axes of the most probable tokens
NONE = -1  # the layer of the final site, and the site of a sum that is the same at every site


def axes(trace: Trace) -> dict[str, list[Any]]:
    """The labels of every axis.

    Sites are called by their index, sources and vectors by their name, tokens by their position,
    and ranks count from 0, the most probable token.
    """
    result: dict[str, list[Any]] = {
        "site": [site.index for site in trace.sites],
        "token": [token.position for token in trace.tokens],
        "source": _sources(trace.sites),
    }
    if trace.logprobs is not None:
        result["rank"] = _ranks(trace.logprobs.unedited)
    if trace.lens is not None:
        result["vector"] = [
            reading.vector if reading.site is None else f"site {reading.site} {reading.vector}"
            for reading in trace.lens
        ]
        result["lens_rank"] = _ranks(trace.lens[0].predictions if trace.lens else [])
    return result


def labels(trace: Trace) -> dict[str, Label]:
    """Further labels of sites, tokens and vectors."""
    texts = np.array([token.text or "" for token in trace.tokens], object)
    layers = [NONE if site.layer is None else site.layer for site in trace.sites]
    result = {
        "layer": Label("site", layers),
        "kind": Label("site", [site.kind for site in trace.sites]),
        "token_id": Label("token", [token.id for token in trace.tokens]),
        "token_text": Label("token", texts),
    }
    if trace.lens is not None:
        sites = [NONE if reading.site is None else reading.site for reading in trace.lens]
        result["vector_site"] = Label("vector", sites)
        result["vector_name"] = Label("vector", [reading.vector for reading in trace.lens])
    return result


def facts(trace: Trace) -> dict[str, Any]:
    """What is true of the whole trace; the edits are JSON, as they were asked for."""
    edits = [edit.model_dump(exclude_none=True) for edit in trace.edits]
    return {
        "model": trace.model,
        "prompt_tokens": trace.prompt_tokens,
        "total_tokens": trace.total_tokens,
        "edits": json.dumps(edits),
    }


def arrays(trace: Trace) -> dict[str, Array]:
    """The numbers, float64 and for ids int64; texts are objects, ``""`` without a tokenizer.

    A text may end with NUL, which strings of NumPy's own lose.
    """
    shape = len(trace.sites), len(trace.tokens)
    entropy = np.array([site.entropy for site in trace.sites], float).reshape(shape)
    result = {
        "weights": Array(("site", "token", "source"), _by_source(trace, "weights")),
        "rms": Array(("site", "token", "source"), _by_source(trace, "rms")),
        "entropy": Array(("site", "token"), entropy),
    }
    if trace.logprobs is not None:
        runs = {"": trace.logprobs.unedited}
        if trace.logprobs.edited is not None:
            runs = {"": trace.logprobs.edited, "unedited_": trace.logprobs.unedited}
        for prefix, rows in runs.items():
            result |= _predicted(prefix, ("token",), shape[1:], "rank", rows)
    if trace.lens is not None:
        every = [row for reading in trace.lens for row in reading.predictions]
        shape = len(trace.lens), len(trace.tokens)
        result |= _predicted("lens_", ("vector", "token"), shape, "lens_rank", every)
    return result


def _sources(sites: Sequence[TracedSite]) -> list[str]:
    """The names of all sources, the partial sum last as at every site."""
    names = dict.fromkeys(name for site in sites for name in site.sources)
    return sorted(names, key=PARTIAL.__eq__)


def _by_source(trace: Trace, name: str) -> np.ndarray:
    """The rows of every site's own sources, ``[sites, tokens, sources]``, NaN where it has none."""
    columns = {source: number for number, source in enumerate(_sources(trace.sites))}
    table = np.full((len(trace.sites), len(trace.tokens), len(columns)), np.nan)
    for number, site in enumerate(trace.sites):
        for source, column in zip(site.sources, np.array(getattr(site, name)).T, strict=False):
            table[number, :, columns[source]] = column
    return table


def _ranks(rows: Sequence[Prediction]) -> list[int]:
    return list(range(len(rows[0].top) if rows else 0))


def _predicted(
    prefix: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    rank: str,
    rows: Sequence[Prediction],
) -> dict[str, Array]:
    """What follows: the logprob of the token that does, and the most probable tokens.

    Args:
        prefix: of the arrays' names.
        axes, shape: of the rows.
        rank: name of the axis of the most probable tokens.
        rows: in order.
    """
    top = [token for row in rows for token in row.top]
    ranked, full = (*axes, rank), (*shape, len(_ranks(rows)))
    following = np.array([row.next for row in rows], float)
    ids = np.array([token.id for token in top], np.int64)
    texts = np.array([token.text or "" for token in top], object)
    logprobs = np.array([token.logprob for token in top], float)
    return {
        f"{prefix}next": Array(axes, following.reshape(shape)),
        f"{prefix}top_id": Array(ranked, ids.reshape(full)),
        f"{prefix}top_text": Array(ranked, texts.reshape(full)),
        f"{prefix}top_logprob": Array(ranked, logprobs.reshape(full)),
    }
