"""What the rounding of AttnRes-3B's own code does to answers, as docs/use/formats.md states it.

In 16 bits that code rounds the product of query and key norm, what it gives with a source, the
weights, their products with sources, the sum over the copies, and that sum with the last product.
Here a mix is rounded once.  Both round sources and what sublayers give.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from goldens import expected
from serving import GOLDENS
from torch import Tensor

from attnres_serve.verify.oracle import Model, load, site_role

GOLDEN = GOLDENS / "baseline_attnres"
PAGE = Path(__file__).parents[2] / "docs" / "use" / "formats.md"


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


class Ours(Model):
    """A mix is rounded once."""

    def embed(self, ids: Sequence[int]) -> Tensor:
        return rounded(super().embed(ids))

    def sublayer(self, s: int, h: Tensor) -> Tensor:
        return rounded(super().sublayer(s, h))

    def mix(self, site: int, x: Tensor, y: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        sources = rounded(self.sources(site, x, y))
        weights = self.depth_softmax(site, sources)
        return rounded(torch.einsum("tn,ntd->td", weights, sources)), weights


class Theirs(Ours):
    """Products and sums are rounded; the root and the softmax are of 32 bits."""

    def mix(self, site: int, x: Tensor, y: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        sources = rounded(self.sources(site, x, y))
        role, layer = site_role(self.spec, site)
        key, query = (self.weight(f"{role}_{part}", layer) for part in ("key", "query"))
        root = (sources.square().mean(-1) + self.spec.key_norm_eps).sqrt()
        scores = (rounded(sources @ rounded(query * key)) / root).T
        scores[:, -1] += self.weight(f"{role}_recency", layer).item()
        weights = rounded(scores.softmax(-1))
        parts = rounded(weights.T[:, :, None] * sources)
        return rounded(rounded(parts[:-1].sum(0)) + parts[-1]), weights


def test_the_difference_is_as_the_page_states() -> None:
    exact = load(GOLDEN)
    models = {kind: kind(exact.spec, exact.weights) for kind in (Model, Ours, Theirs)}
    prompts = [case["prompt"] for case in expected(GOLDEN)]
    tables = {kind: [model.logprobs(ids) for ids in prompts] for kind, model in models.items()}

    def divergence(one: type[Model], other: type[Model]) -> Tensor:
        pairs = zip(tables[one], tables[other], strict=True)
        return torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs])

    pairs = zip(tables[Ours], tables[Theirs], prompts, strict=True)
    gaps = torch.cat(
        [(a - b)[:-1].gather(1, torch.tensor(ids[1:])[:, None]).abs() for a, b, ids in pairs]
    )
    between = divergence(Ours, Theirs)
    found = [between.mean(), between.max(), gaps.mean(), gaps.max()]
    found += [divergence(Model, kind).mean() for kind in (Ours, Theirs)]
    section = PAGE.read_text().partition("## baseline_attnres")[2].partition("\n## ")[0]
    said = " ".join(section.split())
    pattern = r"differ by (\S+) nats .* mean and (\S+) at most; logprobs by (\S+) .* and (\S+) at "
    pattern += r"most\. From float64 ours is (\S+) nats away and theirs (\S+)\."
    stated = re.search(pattern, said)
    assert stated is not None
    for value, text in zip(found, stated.groups(), strict=True):
        digits = text.partition("e")[0].replace(".", "").lstrip("0")
        assert f"{value.item():.{len(digits) - 1}e}" == f"{float(text):.{len(digits) - 1}e}", text
