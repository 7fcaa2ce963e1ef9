"""The float64 oracle rounded to bfloat16 where an engine in bfloat16 stores what it computed.

Everything in between stays float64, so that what is lost here is lost to the activations' format
alone, and whatever loses more computes something less exactly than it could.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres_serve.verify import oracle
from attnres_serve.verify.compare import Passage
from attnres_serve.verify.oracle.sublayers import Attention, Weights


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def divergence(
    model: Any, prompts: Iterable[Sequence[int]], found: Iterable[Tensor]
) -> list[float]:
    """KL divergence of logprobs ``[T, vocabulary]``, or without the last, from ``model``'s."""
    each: list[float] = []
    for ids, table in zip(prompts, found, strict=True):
        exact = model.logprobs(ids)[: len(table)]
        each += (exact.exp() * (exact - table)).sum(-1).tolist()
    return each


class RoundedWeights(Weights):
    """Linears that read and give bfloat16."""

    def linear(self, x: Tensor, leaf: str) -> Tensor:
        return rounded(super().linear(rounded(x), leaf))


class RoundedAttention(Attention):
    """Attention by torch's own function, on rounded queries and keys."""

    def attend(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        q, k, v = self.queries_keys_values(x, positions, weights)
        heads = (part.transpose(0, 1) for part in (rounded(q), rounded(k), v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return y.transpose(0, 1).flatten(1)


def rounded_model(model: oracle.Model) -> "Rounded":
    """The same checkpoint, rounded."""
    attention = RoundedAttention(**vars(model.spec.sublayers["attention"]))
    sublayers = model.spec.sublayers | {"attention": attention}
    return Rounded(replace(model.spec, sublayers=sublayers), model.weights)


class Rounded(oracle.Model):
    """A model whose sites read blocks, each the sum of its own sublayers' outputs."""

    def weights_of(self, place: oracle.Place) -> Weights:
        return RoundedWeights(**vars(super().weights_of(place)))

    def norm(self, site: int, h: Tensor) -> Tensor:
        return rounded(super().norm(site, h))

    def logits(self, normed: Tensor) -> Tensor:
        return rounded(super().logits(normed))

    def sources(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        spans = oracle.source_spans(self.spec.starts, site)
        sums = [reduce(lambda total, one: rounded(total + one), y[b:e]) for b, e in spans]
        return torch.stack([x, *sums])

    def site_losses(self, passages: Sequence[Passage]) -> list[float]:
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
            error += _squares(passage.normed[site].double() - exact)
            least += _squares(rounded(exact) - exact)
        return math.sqrt(error / least)


def part_losses(model: oracle.Model, passages: Sequence[Passage]) -> list[float]:
    """Per sublayer and of the head the error, in units of what the rounded model's makes.

    Each part is given what the engine's norm gave to it, with sites or without.
    """
    judge, each = rounded_model(model), []
    for passage in passages:
        normed = [tensor.double() for tensor in passage.normed]
        exact, least = (_parts(one, passage.ids, normed) for one in (model, judge))
        found = [*passage.received[1:], passage.logits]
        each.append([_distances(exact, other) for other in (found, least)])
    error, least = torch.tensor(each, dtype=torch.float64).sum(0)
    return (error / least).sqrt().tolist()


def _parts(model: oracle.Model, ids: Sequence[int], normed: Sequence[Tensor]) -> list[Tensor]:
    _, outputs, logits = model.from_normed(ids, normed)
    return [*outputs, logits]


def _distances(exact: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    return [_squares(one.double() - other) for one, other in zip(found, exact, strict=True)]


def _squares(x: Tensor) -> float:
    return x.square().sum().item()
