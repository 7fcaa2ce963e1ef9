"""Records what the sites of a sequence attend to, for ``POST /v1/attn_res/trace``.

A trace is a replay: the workers run the sequence through their own modules once more, eager and
alone, and listen at the sites.  So it does not depend on what else is in a batch, on chunks, cached
prefixes or graphs, and requests that are not traced run exactly the code that they run without it.
The weights are computed from a site's sources by the specification, ``kernels.reference``; what the
site itself made of them, by whatever algorithm and backend, has to agree.  Then, where an edit says
so, the site gives something else (``tracing.intervene``).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres_serve.compat import decoder, replay
from attnres_serve.depth.edits import Resolved
from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.site_norm import SiteNorm, SiteOrderError, recorded_sites
from attnres_serve.tracing.intervene import Intervention
from attnres_serve.tracing.lens import Reader
from attnres_serve.tracing.listen import TOKENS_AT_ONCE, folded, rms, sources_of
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.vectors import Vectors

# How far a site's own result may be from the mix by the traced weights: some roundings of answers
# of phase 1 and of the result in 8 bits (bfloat16), or the scores of a float32 product in TF32.
CLOSE = {torch.float32: 1e-2}
CLOSE_ROUNDED = 2**-4


class TraceError(RuntimeError):
    """A trace that would not be what the server computes; the message is one sentence."""


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
    """The weights of a site, and whether they explain what it gave.

    Args:
        sources: ``n`` tensors ``[T, d]`` of one dtype.
        site: what the site has learned.
        normed: ``[T, d]``, what the site gave.

    Returns:
        The trace of the site, and ``[T]`` float32: the distance between ``normed`` and the normed
        mix by these weights, relative to its length, and to the size of the sources where they
        cancel in the mix.  The check is blind where sources cancel almost wholly: what lets
        their roundings pass lets wrong weights pass, too.
    """
    mixed, weights = reference.mix(sources, folded(site), site.key_eps, bias=site.bias)
    sizes = torch.stack([rms(source) for source in sources], dim=-1)
    wanted = reference.rms_norm(mixed, site.norm_weight, site.norm_eps)
    tiny = torch.finfo(torch.float32).tiny  # a padding token's embedding may be all zeros
    distance = (normed.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=tiny)
    cancelled = (weights * sizes).sum(-1) / rms(mixed).clamp(min=tiny)
    return SiteTrace(weights, sizes), distance / cancelled.clamp(min=1)


class Recorder:
    """A forward hook of the sites that are traced.

    It runs before the hook of ``intervention``, so it sees what a site gave by itself.

    Args:
        positions: ascending, the tokens that are traced.
        intervention: what changes the weights then.
        takers: of the sources, and of the weights by which they are read.
    """

    def __init__(
        self, positions: Sequence[int], intervention: Intervention, *takers: Reader | Vectors
    ) -> None:
        self.positions, self.intervention, self.takers = positions, intervention, takers
        self.seen: Counter[int] = Counter()  # tokens by site
        self.parts: dict[int, list[SiteTrace]] = {}
        self.wrong: str | None = None

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
            if index in self.intervention.sites:
                chosen = self.intervention.sources(index, chosen, positions)
                _, weights = self.intervention.weights(index, chosen, site, positions)
                sizes = torch.stack([rms(source) for source in chosen], dim=-1)
            parts.append(SiteTrace(weights.cpu(), sizes.cpu()))
            for taker in self.takers:
                taker.take(index, chosen, weights)
            far = ~(distance <= CLOSE.get(normed.dtype, CLOSE_ROUNDED))  # NaN as well
            if self.wrong is None and bool(far.any()):
                token = positions[int(far.nonzero()[0])]
                self.wrong = (
                    f"site {index} of this server does not give the mix of its sources by the "
                    f"traced weights at token {token}, so there is no trace."
                )

    def traces(self) -> dict[int, SiteTrace]:
        """The trace of every site that was listened to.

        Raises:
            TraceError: a site gave something else than its weights say.
        """
        if self.wrong is not None:
            raise TraceError(self.wrong)
        return {
            index: SiteTrace(*(torch.cat(part) for part in zip(*parts, strict=True)))
            for index, parts in self.parts.items()
        }


def record(
    worker,
    ids: Sequence[int],
    positions: Sequence[int],
    wanted: Sequence[int],
    edits: Sequence[Resolved] = (),
    predictions: Predictions | None = None,
    lens: Reader | None = None,
    vectors: Vectors | None = None,
) -> dict[int, SiteTrace]:
    """Replay a sequence; every worker of the engine does so at once.

    Args:
        worker: vLLM's.
        ids: the sequence.
        positions: ascending, the tokens that are traced.
        wanted: indices of sites.
        edits: of what sites read.
        predictions: takes what follows the tokens.
        lens: takes what sites mix, which are among those that are wanted, and predicts from it.
        vectors: takes what sites read, mix and are given.

    Returns:
        The traces of those of them that mix and are in this worker's pipeline stage, with the
        weights by which they were read.

    Raises:
        TraceError: a site gave something else than its weights say, or edited weights are not
            numbers.
        SiteOrderError: the sites did not run as they do when the model is loaded.
    """
    installed = decoder.inner_model(worker).attn_res_sites
    intervention = Intervention(edits)
    recorder = Recorder(positions, intervention, *(x for x in (lens, vectors) if x is not None))
    own = [norm for at, norm in installed.items() if at in wanted and norm.site.mixes]
    handles = [norm.register_forward_hook(recorder) for norm in own]
    changed = [norm for at, norm in installed.items() if at in intervention.sites]
    handles += [norm.register_forward_hook(intervention) for norm in changed]
    behind = [norm for at, norm in installed.items() if vectors and at - 1 in wanted]
    handles += [norm.register_forward_pre_hook(vectors) for norm in behind]
    try:
        with recorded_sites() as ran:  # not counted as a pass that serves
            passes = replay.replay(worker, ids, predictions)
    finally:
        for handle in handles:
            handle.remove()
        if lens is not None:
            lens.collect()
    if lens is not None:
        lens.predict(worker)
    if intervention.wrong is not None:
        raise TraceError(intervention.wrong)
    if ran != sorted(installed) * passes:
        raise SiteOrderError("the sites did not run one after the other.")
    return recorder.traces()
