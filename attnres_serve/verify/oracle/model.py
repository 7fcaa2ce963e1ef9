"""An independent float64 evaluation of Attention-Residuals language models.

Written from the equations of arXiv 2603.15031; shares no code with what serves. Every call
evaluates the whole sequence, and every site sums its blocks anew from the sublayers' outputs.

With y_s the output of sublayer s of the spec's layout, x the token embedding and block starts
0 = b_0 < b_1 < ..., the sources a site s can see are

    V = [x] + [y_b + ... + y_(e-1) for each start b < s],    e = min(next start, s)

so the newest block is present only as far as it has been computed. In a cumulative model a source
is instead all that was summed up to a start, and the last one all that there is:

    V = [x + y_0 + ... + y_(b-1) for each start b <= s] + [x + y_0 + ... + y_(s-1)]

The site mixes them by softmax_i(scale * <query, RMSNorm(V_i)> + b_i), where b_i is
stored for every source, or for the last alone, or 0. Its sublayer (at the last site: the head)
reads the result. Without a final mix the head reads V's last.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attnres_serve.verify.oracle.edits import edited
from attnres_serve.verify.oracle.norm import rms_norm
from attnres_serve.verify.oracle.spec import Place, Spec, site_role, source_spans
from attnres_serve.verify.oracle.sublayers import Weights

SMALL = 512  # hidden size


@contextmanager
def threads_for(hidden: int) -> Iterator[None]:
    """Use one thread for small matrices: a second thread can cost tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if hidden < SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Model:
    """A checkpoint in float64. `weights` is keyed by the format's tensor names."""

    spec: Spec
    weights: dict[str, Tensor] = field(repr=False)

    def with_spec(self, spec: Spec) -> "Model":
        """The same tensors, mixed by another specification."""
        return replace(self, spec=spec)

    def weight(self, role: str, layer: int | None = None, leaf: str = "") -> Tensor:
        return self.weights[self.spec.names[role].format(layer) + leaf]

    def weights_of(self, place: Place) -> Weights:
        """The tensors of one sublayer."""
        return Weights(self.weights, partial(self.spec.tensor_name, place))

    def norm_eps(self, site: int) -> float:
        """The eps of the norm that reads the mix of `site`."""
        return self.spec.eps

    def sublayer(self, s: int, h: Tensor) -> Tensor:
        """y_s: the norm and the sublayer after the mix h [tokens, hidden] of site s."""
        return self.apply(s, self.norm(s, h))

    def apply(self, s: int, normed: Tensor) -> Tensor:
        """y_s from the norm's output [tokens, hidden]."""
        place = self.spec.layout[s]
        compute = self.spec.sublayers[place.kind]
        return compute(normed, torch.arange(len(normed)), self.weights_of(place))

    def norm(self, site: int, h: Tensor) -> Tensor:
        """The norm of the mix h [tokens, hidden] of `site`."""
        if site == self.spec.final:
            weight = self.weight("final_norm")
        else:
            layer, kind = self.spec.layout[site]
            weight = self.weight(f"{kind}_norm", layer)
        return rms_norm(h, weight, self.norm_eps(site))

    def logits(self, normed: Tensor) -> Tensor:
        """The logits [tokens, vocab] from the last norm's output [tokens, hidden]."""
        return normed @ self.weight("embedding" if self.spec.tied else "head").T

    def head(self, h: Tensor) -> Tensor:
        """Last norm, head and log-softmax: h [tokens, hidden] -> [tokens, vocab]."""
        return self.logits(self.norm(self.spec.final, h)).log_softmax(-1)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """[tokens, hidden]"""
        rows = self.weight("embedding")[torch.as_tensor(list(ids), dtype=torch.long)]
        return rows * self.spec.embedding_scale

    def depth_softmax(self, site: int, sources: Tensor) -> Tensor:
        """Weights [tokens, sources] that `site` gives to sources [sources, tokens, hidden]."""
        role, layer = site_role(self.spec, site)
        keys = rms_norm(sources, self.weight(f"{role}_key", layer), self.spec.key_norm_eps)
        scores = self.spec.logit_scale * (keys @ self.weight(f"{role}_query", layer).flatten()).T
        if self.spec.recency_bias:
            scores[:, -1] += self.weight(f"{role}_recency", layer)
        if self.spec.source_bias:
            scores = scores + self.weight(f"{role}_recency", layer)
        if edits := self.spec.edits.get(site):
            scores = edited(scores, edits)
        return scores.softmax(-1)

    def sources(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """V of `site` [sources, tokens, hidden], from the embedding x and the outputs y_0 ..."""
        starts = self.spec.starts
        if self.spec.cumulative:
            ends = [*(b for b in starts if b <= site), site]
            return torch.stack([torch.stack([x, *y[:end]]).sum(0) for end in ends])
        spans = source_spans(starts, site)
        return torch.stack([x, *(torch.stack(list(y[b:e])).sum(0) for b, e in spans)])

    def mix(self, site: int, x: Tensor, y: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """What `site` reads [tokens, hidden], and its weights [tokens, sources] if it mixes."""
        if self.spec.block_starts is None:
            return torch.stack([x, *y]).sum(0), None
        sources = self.sources(site, x, y)
        if site == self.spec.final and not self.spec.final_mix:
            return sources[-1], None
        weights = self.depth_softmax(site, sources)
        return torch.einsum("tn,ntd->td", weights, sources), weights

    def normed(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """The input of the sublayer of `site`, from the embedding x and the outputs y_0 ..."""
        return self.norm(site, self.mix(site, x, y)[0])

    def from_normed(
        self, ids: Sequence[int], normed: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Embedding, outputs and logits with the norms' outputs `normed`, [tokens, hidden] each."""
        outputs = [self.apply(site, x) for site, x in enumerate(normed[:-1])]
        return self.embed(ids), outputs, self.logits(normed[-1])

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities [len(ids), vocab] of the token after each position."""
        with threads_for(self.spec.hidden):
            x = self.embed(ids)
            y: list[Tensor] = []
            for site in range(self.spec.final):
                y.append(self.sublayer(site, self.mix(site, x, y)[0]))
            return self.head(self.mix(self.spec.final, x, y)[0])

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[list[int], list[float], list[float]]:
        """`n` greedy tokens, their log-probabilities and their lead over the runner-up."""
        ids, logprobs, gaps = list(prompt), [], []
        for _ in range(n):
            best = self.logprobs(ids)[-1].topk(2)
            ids.append(int(best.indices[0]))
            logprobs.append(best.values[0].item())
            gaps.append((best.values[0] - best.values[1]).item())
        return ids[len(prompt) :], logprobs, gaps
