"""A model with ordinary residuals that equals one of Attention Residuals whose queries are zero."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnres_serve.verify import oracle


@dataclass
class Scaled(oracle.Model):
    """The norm that reads a site uses n^2 eps, n being the sources that the site would have.

    For RMSNorm(x / n, eps) = RMSNorm(x, n^2 eps).
    """

    starts: Sequence[int] = (0,)

    def norm_eps(self, site: int) -> float:
        return (1 + len(oracle.source_spans(self.starts, site))) ** 2 * self.spec.eps


def load(folder: Path, starts: Sequence[int]) -> Scaled:
    """A checkpoint with ordinary residuals, for blocks that begin at the sublayers `starts`."""
    plain = oracle.load(folder)
    return Scaled(plain.spec, plain.weights, starts)
