"""Helpers for forward hooks of sites."""

from collections.abc import Sequence

from torch import Tensor

from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.site_norm import SiteNorm, SiteOrderError

TOKENS_AT_ONCE = 256  # tokens of one chunk of stacked float32 sources, or of logits


def sources_of(norm: SiteNorm, arguments: tuple, output) -> tuple[Sequence[Tensor], Tensor]:
    """The sources of a site that ran, ``[T, d]`` each, and its output."""
    count = norm.site.num_sources
    if isinstance(output, Tensor):  # site 0 reads the embedding alone
        return [arguments[0]] * count, output
    normed, state = output
    sources = state.unbind(1) if isinstance(state, Tensor) else state.sources()
    if len(sources) != count:
        raise SiteOrderError(
            f"site {norm.site.index} has {len(sources)} sources instead of {count}."
        )
    return sources, normed


def folded(site: SiteWeights) -> Tensor:
    """The effective query ``[d]`` float32, whose product with a normed source is a logit."""
    return site.query * site.key_norm * site.logit_scale


def rms(x: Tensor) -> Tensor:
    """The root mean square of ``x [..., d]``, ``[...]`` float32."""
    return x.float().square().mean(-1).sqrt()
