"""Sums of what sites attend to over many sequences, and ``GET /v1/attn_res/statistics`` of them."""

import numpy as np
from pydantic import BaseModel, Field

from attnres_serve.depth.sites import Site
from attnres_serve.tracing.answer import ReadingSite, short

COST = 0.02
BINS = 16  # of weights, from 0 to 1; the last has 1, too
_HEAD = 3  # numbers of a source before its bins


class Phase(BaseModel):
    """What one site attends to, over all tokens of prompts or of answers that were counted."""

    mean: list[float] = Field(description="of the weight of every source; their sum is 1")
    second_moment: list[float] = Field(description="the mean of every squared weight")
    entropy: float = Field(description="the mean entropy of a token's weights, in nats")
    histogram: list[list[int]] = Field(description=f"of every source, {BINS} equal bins of 0..1")


class SiteStatistics(ReadingSite):
    """What one site attends to."""

    prefill: Phase | None = Field(default=None, description="of prompts; null without tokens")
    decode: Phase | None = Field(default=None, description="of answers; null without tokens")


class StatisticsAnswer(BaseModel):
    """The answer."""

    model: str
    running: bool = Field(default=False, description="whether requests that begin now are counted")
    problem: str | None = Field(default=None, description="why they ended by themselves, or null")
    cost: float = Field(default=COST, description="share of the time that replays may take")
    seconds: float = Field(default=0, description="that replays took")
    weights: str | None = Field(default=None, description="their version; null before vLLM 0.32")
    restarts: int = Field(default=0, description="how often new weights had counts begin anew")
    sequences: int = Field(default=0, description="that were counted")
    tokens: dict[str, int] = Field(default={"prefill": 0, "decode": 0}, description="counted ones")
    skipped: dict[str, int] = Field(
        default={"too_long": 0, "queue_full": 0, "weights_replaced": 0}, description="sequences"
    )
    sites: list[SiteStatistics] = Field(default=[], description="none before a sequence is counted")


def sums(weights: np.ndarray, prompt: int) -> np.ndarray:
    """Sums over the tokens of a sequence, at one site.

    Args:
        weights: ``[T, n]``, of every source.
        prompt: how many of the tokens are the prompt.

    Returns:
        ``[2, n, 3 + BINS]`` float64, prefill and decode: of every source the sum of weights w, of
        w^2 and of -w log w, and the tokens in each bin of w.
    """
    wide = weights.astype(np.float64)
    sources = wide.shape[1]
    bins = np.minimum((wide * BINS).astype(int), BINS - 1) + BINS * np.arange(sources)
    totals = np.empty((2, sources, _HEAD + BINS))
    for phase, rows in zip(totals, (slice(prompt), slice(prompt, None)), strict=True):
        selected = wide[rows]
        logs = selected * np.log(np.where(selected > 0, selected, 1))
        phase[:, :_HEAD] = np.stack([selected.sum(0), (selected**2).sum(0), -logs.sum(0)], axis=1)
        counts = np.bincount(bins[rows].ravel(), minlength=BINS * sources)
        phase[:, _HEAD:] = counts.reshape(sources, BINS)
    return totals


def of_site(site: Site, totals: np.ndarray, tokens: dict[str, int]) -> SiteStatistics:
    """The statistics of a site, from the sum of all ``sums`` and the tokens of each phase."""
    phases: dict[str, Phase] = {}
    for (name, count), rows in zip(tokens.items(), totals, strict=True):
        if count:
            mean, square, entropy = rows[:, :_HEAD].T / count
            histogram = rows[:, _HEAD:].astype(int).tolist()
            (total,) = short(np.abs(entropy.sum(keepdims=True)))
            phases[name] = Phase(
                mean=short(mean), second_moment=short(square), entropy=total, histogram=histogram
            )
    about = {"layer": site.layer, "kind": site.kind, "sources": site.sources}
    return SiteStatistics.model_validate({"index": site.index} | about | phases)
