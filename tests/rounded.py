"""The float64 oracle rounded to bfloat16 where an engine in bfloat16 stores what it computed.

Everything in between stays float64, so that what is lost here is lost to the activations' format
alone, and whatever loses more computes something less exactly than it could.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres_serve import oracle
from attnres_serve.oracle_rotary import rotate
from attnres_serve.verify import Passage


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def divergence(
    model: oracle.Model, prompts: Iterable[Sequence[int]], found: Iterable[Tensor]
) -> list[float]:
    """KL divergence of logprobs ``[T, vocabulary]``, or without the last, from ``model``'s."""
    each: list[float] = []
    for ids, table in zip(prompts, found, strict=True):
        exact = model.logprobs(ids)[: len(table)]
        each += (exact.exp() * (exact - table)).sum(-1).tolist()
    return each


class Rounded(oracle.Model):
    """A model whose sites read blocks, each the sum of its own sublayers' outputs."""

    def linear(self, x: Tensor, role: str, layer: int, leaf: str) -> Tensor:
        return rounded(super().linear(rounded(x), role, layer, leaf))

    def attention(self, x: Tensor, layer: int) -> Tensor:
        spec, tokens = self.spec, len(x)
        q, k, v = (
            self.linear(x, "attention", layer, f"{part}_proj").view(tokens, -1, spec.head_dim)
            for part in "qkv"
        )
        q, k = (rounded(rotate(part, spec.rope)) for part in (q, k))
        heads = (part.transpose(0, 1) for part in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.linear(y.transpose(0, 1).flatten(1), "attention", layer, "o_proj")

    def norm(self, site: int, h: Tensor) -> Tensor:
        return rounded(super().norm(site, h))

    def logits(self, normed: Tensor) -> Tensor:
        return rounded(super().logits(normed))

    def sources(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        spans = oracle.source_spans(self.spec.starts, site)
        sums = [reduce(lambda total, one: rounded(total + one), y[b:e]) for b, e in spans]
        return torch.stack([x, *sums])

    def losses(self, passages: Sequence[Passage]) -> list[float]:
        """Per mixing site its error, in units of what the rounding of its result alone makes.

        Each site is given what the engine's was given.
        """
        sites = range(1, len(passages[0].normed))
        return [self._loss(site, passages) for site in sites]

    def _loss(self, site: int, passages: Sequence[Passage]) -> float:
        error = least = 0.0
        for passage in passages:
            x, *y = (tensor.double() for tensor in passage.received[: site + 1])
            exact = super().norm(site, self.mix(site, x, y)[0])
            error += (passage.normed[site].double() - exact).square().sum().item()
            least += (rounded(exact) - exact).square().sum().item()
        return math.sqrt(error / least)
