"""A trace as data: the response of ``POST /v1/attn_res/trace``, which `inspect` draws."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from attnres_serve.depth.edits import Edit
from attnres_serve.depth.sites import Site

DIGITS = 6  # significant digits of every number


class TracedToken(BaseModel):
    """A token that was traced."""

    position: int
    id: int
    text: str | None = Field(description="null on a server without a tokenizer")


class ReadingSite(BaseModel):
    """A site, and what it reads."""

    index: int
    layer: int | None = Field(description="null for the final site")
    kind: str = Field(description="attention, mlp or final")
    sources: list[str] = Field(description="embedding, block 1, ..., partial")


class TracedSite(ReadingSite):
    """What one site attends to; the rows are the traced tokens."""

    weights: list[list[float]] = Field(description="tokens x sources; rows sum to 1")
    rms: list[list[float]] = Field(description="root mean square of every source")
    entropy: list[float] = Field(description="of every row of weights, in nats")


class LikelyToken(BaseModel):
    """A token that may follow."""

    id: int
    text: str | None = Field(description="null on a server without a tokenizer")
    logprob: float


class Prediction(BaseModel):
    """What follows one token."""

    position: int
    next: float | None = Field(
        description="logprob of the token that follows in the sequence; null at its end"
    )
    top: list[LikelyToken] = Field(description="the most probable tokens, in order")


class Logprobs(BaseModel):
    """What follows every traced token."""

    unedited: list[Prediction]
    edited: list[Prediction] | None = Field(None, description="null without edits")


class LensReading(BaseModel):
    """What one vector would predict through the model's last norm and head."""

    site: int | None = Field(
        description="whose mix or partial sum it is; null for a sum that is the same at every site"
    )
    vector: str = Field(description="mix, embedding, block 1, ..., partial")
    predictions: list[Prediction]


class TraceAnswer(BaseModel):
    """The answer."""

    model: str
    prompt_tokens: int = Field(description="tokens of the sequence that were given")
    total_tokens: int = Field(description="tokens of the sequence, generated ones included")
    tokens: list[TracedToken]
    sites: list[TracedSite]
    edits: list[Edit] = Field(
        [], description="by which sites were read, as asked for; `replace` without its vectors"
    )
    logprobs: Logprobs | None = Field(None, description="null if they were not asked for")
    lens: list[LensReading] | None = Field(
        None, description="under the edits; null if it was not asked for"
    )
    weights: str | None = Field(
        None, description="version of the weights, as a trainer called it; null before vLLM 0.32"
    )


class ReplayResult(NamedTuple):
    """The merged results of all workers for a replay.

    Attributes:
        problem: the first problem, or None.
        sites: by site the bytes of weights and RMS.
        predicted: the result of ``Predictions.packed``, or None.
        lens: the same for all readings in order.
        vectors: by name the shape and the bytes of each.
    """

    problem: str | None
    sites: dict[int, tuple[bytes, bytes]]
    predicted: list[bytes] | None
    lens: list[bytes] | None = None
    vectors: Mapping[str, tuple[Sequence[int], bytes]] = MappingProxyType({})


def merged(workers: Sequence[dict[str, Any]]) -> ReplayResult:
    """The merged results of ``worker.WorkerExtension.attn_res_trace`` on each worker."""
    problems = [worker["problem"] for worker in workers if worker["problem"] is not None]
    sites = {index: (weights, rms) for worker in workers for index, weights, rms in worker["sites"]}
    predicted, lens = (
        next((worker[key] for worker in workers if worker[key] is not None), None)
        for key in ("predicted", "lens")
    )
    vectors = {name: vector for worker in workers for name, vector in worker["vectors"].items()}
    return ReplayResult(next(iter(problems), None), sites, predicted, lens, vectors)


def without_sites(
    model: str,
    ids: Sequence[int],
    prompt_tokens: int,
    positions: Sequence[int],
    texts: Sequence[str | None],
) -> dict[str, Any]:
    """A ``TraceAnswer`` without its sites, for a sequence without edits.

    Args:
        model: name of the model.
        ids: the sequence.
        prompt_tokens: number of its tokens that were not generated.
        positions, texts: positions and texts of the traced tokens.
    """
    return {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "total_tokens": len(ids),
        "tokens": [
            {"position": position, "id": ids[position], "text": text}
            for position, text in zip(positions, texts, strict=True)
        ],
        "edits": [],
        "logprobs": None,
        "lens": None,
    }


def traced_site(site: Site, weights: bytes, rms: bytes, rows: int) -> dict[str, Any]:
    """A ``TracedSite``.

    Args:
        site: the site.
        weights, rms: the workers' results, ``[rows, sources]`` float32.
        rows: number of traced tokens.
    """
    shape = rows, site.num_sources
    shares, sizes = (np.frombuffer(x, np.float32).reshape(shape) for x in (weights, rms))
    wide = shares.astype(np.float64)
    entropy = np.abs((wide * np.log(np.where(wide > 0, wide, 1))).sum(-1))
    return {
        "index": site.index,
        "layer": site.layer,
        "kind": site.kind,
        "sources": site.sources,
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
