"""A trace as data: what ``POST /v1/attn_res/trace`` answers and ``attnres-serve inspect`` draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from attnres_serve.depth.sites import Site, source_names

DIGITS = 6  # significant ones of every number


class TracedToken(BaseModel):
    """A token that was traced."""

    position: int
    id: int
    text: str | None = Field(description="null on a server without a tokenizer")


class TracedSite(BaseModel):
    """What one site attends to; the rows are the traced tokens."""

    index: int
    layer: int | None = Field(description="null for the final site")
    kind: str = Field(description="attention, mlp or final")
    sources: list[str] = Field(description="embedding, block 1, ..., partial")
    weights: list[list[float]] = Field(description="tokens x sources; rows sum to 1")
    rms: list[list[float]] = Field(description="root mean square of every source")
    entropy: list[float] = Field(description="of every row of weights, in nats")


class Trace(BaseModel):
    """The answer."""

    model: str
    prompt_tokens: int = Field(description="tokens of the sequence that were given")
    total_tokens: int = Field(description="tokens of the sequence, generated ones included")
    tokens: list[TracedToken]
    sites: list[TracedSite]


def merged(
    workers: Sequence[dict[str, Any]],
) -> tuple[str | None, dict[int, tuple[bytes, bytes]]]:
    """Merge what the workers of an engine answer.

    Args:
        workers: what ``worker.WorkerExtension.attn_res_trace`` answers for each.

    Returns:
        The first problem, or None; and by site the bytes of weights and RMS.
    """
    problems = [worker["problem"] for worker in workers if worker["problem"] is not None]
    found = {index: (own, rms) for worker in workers for index, own, rms in worker["sites"]}
    return next(iter(problems), None), found


def head(
    model: str,
    ids: Sequence[int],
    given: int,
    positions: Sequence[int],
    texts: Sequence[str | None],
) -> dict[str, Any]:
    """A ``Trace`` without its sites.

    Args:
        model: name of the model.
        ids: the sequence.
        given: how many of its tokens were not generated.
        positions, texts: of the traced tokens.
    """
    return {
        "model": model,
        "prompt_tokens": given,
        "total_tokens": len(ids),
        "tokens": [
            {"position": position, "id": ids[position], "text": text}
            for position, text in zip(positions, texts, strict=True)
        ],
    }


def traced_site(site: Site, weights: bytes, rms: bytes, rows: int) -> dict[str, Any]:
    """A ``TracedSite``.

    Args:
        site: the site.
        weights, rms: what the workers found, ``[rows, sources]`` float32.
        rows: traced tokens.
    """
    shape = rows, site.num_sources
    shares, sizes = (np.frombuffer(x, np.float32).reshape(shape) for x in (weights, rms))
    wide = shares.astype(np.float64)
    entropy = np.abs((wide * np.log(np.where(wide > 0, wide, 1))).sum(-1))
    return {
        "index": site.index,
        "layer": site.layer,
        "kind": site.kind,
        "sources": source_names(site),
        "weights": short(shares),
        "rms": short(sizes),
        "entropy": short(entropy),
    }


def short(values: np.ndarray) -> list:
    """The values, rounded to ``DIGITS`` significant digits."""
    wide = values.astype(np.float64)
    size = np.floor(np.log10(np.where(wide == 0, 1, np.abs(wide))))
    unit = 10.0 ** np.clip(DIGITS - 1 - size, -300, 300)
    return (np.round(wide * unit) / unit).tolist()
