"""Mean and spread of depth weights over a text's tokens, in memory that does not grow with it.

Means are sums in float64.  Quantiles are read off histograms whose
bins are 64 steps of every power of two, down to 2^-20: a quantile is the middle of the bin of its
order statistic, so it is at most 1/128 of itself off, and below 2^-20, about 1e-6, it is 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnres_serve.inspect.rows import SiteRow, arrays_of, columns
from attnres_serve.inspect.token_classes import CLASSES

ALL = "all"
PERCENTILES = (10, 90)
STEPS, OCTAVES = 64, 20
_SHIFT = 23 - 6  # bits of a float32's mantissa that are below a step
_FIRST = (127 - OCTAVES) << 6  # the steps below the least power of two
BINS = STEPS * OCTAVES + 2  # below it, its steps, and 1 itself


class Summary(NamedTuple):
    """Depth weights over a text, of ``K`` classes, ``S`` sites and up to ``N`` sources.

    Numbers are NaN where a site has no such source, or the text no such token.

    Attributes:
        model: what the checkpoint is called.
        rows: the sites.
        classes: ``all``, and ``CLASSES``.
        tokens: ``[K]`` int64, how many tokens of each class there are.
        mean, low, high: ``[K, S, N]`` float64: mean, 10 % and 90 % quantile over the tokens.
    """

    model: str
    rows: list[SiteRow]
    classes: tuple[str, ...]
    tokens: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Statistics:
    """The sums and histograms of a text.

    Args:
        rows: the sites.
    """

    def __init__(self, rows: list[SiteRow]) -> None:
        self.rows = rows
        self.tokens = np.zeros(len(CLASSES), np.int64)
        shapes = [(len(CLASSES), len(row.sources)) for row in rows]
        self._sums = [np.zeros(shape) for shape in shapes]
        self._counts = [np.zeros((*shape, BINS), np.uint32) for shape in shapes]

    def add(self, weights: Sequence[np.ndarray], classes: np.ndarray) -> None:
        """Add the tokens of a piece.

        Args:
            weights: of every site, ``[T, n]`` float32.
            classes: ``[T]``, places in ``CLASSES``.
        """
        self.tokens += np.bincount(classes, minlength=len(CLASSES))
        member = np.equal.outer(np.arange(len(CLASSES)), classes).astype(np.float64)
        for own, sums, counts in zip(weights, self._sums, self._counts, strict=True):
            sums += member @ own.astype(np.float64)
            cells = classes[:, None] * own.shape[1] + np.arange(own.shape[1])
            places = cells * BINS + bins(own)
            new = np.bincount(places.ravel(), minlength=counts.size).astype(np.uint32)
            counts += new.reshape(counts.shape)

    def summary(self, model: str) -> Summary:
        """The numbers so far."""
        tokens = np.array([self.tokens.sum(), *self.tokens])
        widest = max(len(row.sources) for row in self.rows)
        shape = len(tokens), len(self.rows), widest
        mean, low, high = (np.full(shape, np.nan) for _ in range(3))
        there = np.flatnonzero(tokens)
        for site, (sums, counts) in enumerate(zip(self._sums, self._counts, strict=True)):
            place = np.ix_(there, np.array([site]), np.arange(sums.shape[1]))
            every = np.concatenate([sums.sum(0, keepdims=True), sums])[there]
            mean[place] = (every / tokens[there, None])[:, None]
            below = np.concatenate([counts.sum(0, keepdims=True, dtype=np.int64), counts])[there]
            below = below.cumsum(-1)
            for result, percent in zip((low, high), PERCENTILES, strict=True):
                rank = -(-tokens[there] * percent // 100)  # counted from 1
                result[place] = middles()[(below < rank[:, None, None]).sum(-1)][:, None]
        return Summary(model, self.rows, (ALL, *CLASSES), tokens, mean, low, high)


def bins(weights: np.ndarray) -> np.ndarray:
    """The bins of float32 weights from 0 to 1; roundings beyond 1 are 1."""
    steps = np.minimum(weights, 1).astype(np.float32).view(np.int32) >> _SHIFT
    return np.maximum(steps - _FIRST + 1, 0)


def middles() -> np.ndarray:
    """What each of the ``BINS`` bins stands for, float64."""
    step = np.arange(STEPS * OCTAVES)
    lower = 2.0 ** (step // STEPS - OCTAVES) * (1 + step % STEPS / STEPS)
    width = 2.0 ** (step // STEPS - OCTAVES) / STEPS
    return np.array([0, *(lower + width / 2), 1])


def table(found: Summary) -> dict[str, list]:
    """A row for each class, site and source."""
    places = [
        (kind, site, source)
        for kind in range(len(found.classes))
        for site, row in enumerate(found.rows)
        for source in range(len(row.sources))
    ]
    own = columns([found.rows[site] for _, site, _ in places])
    return {
        "tokens of": [found.classes[kind] for kind, _, _ in places],
        "tokens": [int(found.tokens[kind]) for kind, _, _ in places],
        **own,
        "source": [found.rows[site].sources[source] for _, site, source in places],
        **{name: [part[place] for place in places] for name, part in _numbers(found).items()},
    }


def arrays(found: Summary) -> dict[str, np.ndarray]:
    """The same as arrays of classes, sites and sources."""
    named = [row.sources for row in found.rows]
    width = max(map(len, named))
    return arrays_of(found.rows) | {
        "source": np.array([[*names, *[""] * (width - len(names))] for names in named]),
        "class": np.array(found.classes),
        "tokens": found.tokens,
        **_numbers(found),
    }


def _numbers(found: Summary) -> dict[str, np.ndarray]:
    return {"mean": found.mean, "low": found.low, "high": found.high}
