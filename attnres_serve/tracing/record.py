"""Records the weights of the sites for a sequence, for ``POST /v1/attn_res/trace``.

A trace is a replay: the workers run the sequence through their modules once more, eagerly and
alone, with hooks at the sites.  So it does not depend on the rest of a batch, on chunks, cached
prefixes or graphs, and requests without a trace run exactly the same code as before.
The weights are computed from a site's sources by the specification, ``kernels.reference``; the
output of the site, with its algorithm and backend, has to agree.  Edits change the output after
that (``tracing.intervene``).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres_serve.compat import decoder, replay
from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.site_norm import SiteNorm, SiteOrderError, recorded_sites
from attnres_serve.tracing.intervene import Intervention
from attnres_serve.tracing.lens import Reader
from attnres_serve.tracing.listen import TOKENS_AT_ONCE, folded, rms, sources_of
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.vectors import Vectors

# The maximum distance of a site's output from the mix by the traced weights.  It allows for
# roundings of phase-1 answers and of the output to 8 bits (bfloat16), and for scores in TF32.
CLOSE = {torch.float32: 1e-2}
CLOSE_ROUNDED = 2**-4


class TraceError(RuntimeError):
    """A trace that would differ from what the server computes; the message is one sentence."""


class SiteTrace(NamedTuple):
    """Weights and magnitudes of the sources of one site.

    Attributes:
        weights: ``[T, n]`` float32, rows sum to 1; sources in the order embedding, finished blocks,
            partial sum.
        rms: ``[T, n]`` float32, root mean square of every source.
    """

    weights: Tensor
    rms: Tensor


def attend(
    sources: Sequence[Tensor], site: SiteWeights, normed: Tensor
) -> tuple[SiteTrace, Tensor]:
    """The weights of a site, and how well they explain its output.

    Args:
        sources: ``n`` tensors ``[T, d]`` of one dtype.
        site: the site's parameters.
        normed: ``[T, d]``, the output of the site.

    Returns:
        The trace of the site, and ``[T]`` float32: the distance between ``normed`` and the normed
        mix by these weights, relative to its length, and to the size of the sources where they
        cancel in the mix.  The check is blind where sources cancel almost completely: a tolerance
        for their roundings lets wrong weights pass, too.
    """
    mixed, weights = reference.mix(sources, folded(site), site.key_eps, bias=site.bias)
    sizes = torch.stack([rms(source) for source in sources], dim=-1)
    expected = reference.rms_norm(mixed, site.norm_weight, site.norm_eps)
    tiny = torch.finfo(torch.float32).tiny  # a padding token's embedding may be all zeros
    distance = (normed.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=tiny)
    cancelled = (weights * sizes).sum(-1) / rms(mixed).clamp(min=tiny)
    return SiteTrace(weights, sizes), distance / cancelled.clamp(min=1)


class Recorder:
    """A forward hook of the traced sites.

    It runs before the hook of ``intervention``, so it sees the unedited output of a site.

    Args:
        positions: the traced positions, ascending.
        intervention: the hook that applies edits; None without edits.
        takers: receive the sources of a site, and its weights under the edits.
    """

    def __init__(
        self, positions: Sequence[int], intervention: Intervention | None, *takers: Reader | Vectors
    ) -> None:
        self.positions, self.intervention, self.takers = positions, intervention, takers
        self.seen: Counter[int] = Counter()  # tokens by site
        self.parts: dict[int, list[SiteTrace]] = {}
        self.problem: str | None = None

    def __call__(self, norm: SiteNorm, arguments: tuple, output) -> None:
        sources, normed = sources_of(norm, arguments, output)
        index, tokens = norm.site.index, len(normed)
        begin = self.seen[index]
        self.seen[index] += tokens
        first, end = (bisect_left(self.positions, at) for at in (begin, begin + tokens))
        parts = self.parts.setdefault(index, [])
        for at in range(first, end, TOKENS_AT_ONCE):
            positions = self.positions[at : min(at + TOKENS_AT_ONCE, end)]
            rows = torch.tensor(positions, device=normed.device) - begin
            chosen = [source[rows] for source in sources]
            site = norm.site_weights()
            traced, distance = attend(chosen, site, normed[rows])
            weights, sizes = traced
            if self.intervention is not None and index in self.intervention.sites:
                chosen = self.intervention.sources(index, chosen, positions)
                _, weights = self.intervention.weights(index, chosen, site, positions)
                sizes = torch.stack([rms(source) for source in chosen], dim=-1)
            parts.append(SiteTrace(weights.cpu(), sizes.cpu()))
            for taker in self.takers:
                taker.take(index, chosen, weights)
            far = ~(distance <= CLOSE.get(normed.dtype, CLOSE_ROUNDED))  # NaN as well
            if self.problem is None and bool(far.any()):
                token = positions[int(far.nonzero()[0])]
                self.problem = (
                    f"site {index} of this server does not give the mix of its sources by the "
                    f"traced weights at token {token}, so there is no trace."
                )

    def traces(self) -> dict[int, SiteTrace]:
        """The trace of every traced site.

        Raises:
            TraceError: the output of a site disagrees with its weights.
        """
        if self.problem is not None:
            raise TraceError(self.problem)
        return {
            index: SiteTrace(*(torch.cat(part) for part in zip(*parts, strict=True)))
            for index, parts in self.parts.items()
        }


def record(
    worker,
    ids: Sequence[int],
    positions: Sequence[int],
    site_indices: Sequence[int],
    edits: Sequence[Resolved] = (),
    predictions: Predictions | None = None,
    lens: Reader | None = None,
    vectors: Vectors | None = None,
) -> dict[int, SiteTrace]:
    """Replay a sequence; all workers of the engine do so together.

    Args:
        worker: vLLM's worker.
        ids: the sequence.
        positions: the traced positions, ascending.
        site_indices: the traced sites.
        edits: the resolved edits.
        predictions: receives the decoder's output.
        lens: receives vectors of traced sites, and predicts from them.
        vectors: receives sources, mixes and sublayer outputs.

    Returns:
        The traces of the mixing sites in this worker's pipeline stage, with the weights under the
        edits.

    Raises:
        TraceError: the output of a site disagrees with its weights, or edited weights are NaN.
        SiteOrderError: the sites did not run in order.
    """
    installed = decoder.inner_model(worker).attn_res_sites
    intervention = Intervention(edits) if edits else None
    recorder = Recorder(positions, intervention, *(x for x in (lens, vectors) if x is not None))
    traced = [norm for at, norm in installed.items() if at in site_indices and norm.site.mixes]
    handles = [norm.register_forward_hook(recorder) for norm in traced]
    if intervention is not None:
        changed = [norm for at, norm in installed.items() if at in intervention.sites]
        handles += [norm.register_forward_hook(intervention) for norm in changed]
    after = [norm for at, norm in installed.items() if vectors and at - 1 in site_indices]
    handles += [norm.register_forward_pre_hook(vectors) for norm in after]
    try:
        with recorded_sites() as ran:  # not counted as a served pass
            passes = replay.replay(worker, ids, predictions)
    finally:
        for handle in handles:
            handle.remove()
        if lens is not None:
            lens.collect()
    if lens is not None:
        lens.predict(worker)
    if intervention is not None and intervention.problem is not None:
        raise TraceError(intervention.problem)
    if ran != sorted(installed) * passes:
        raise SiteOrderError("the sites did not run one after the other.")
    return recorder.traces()
