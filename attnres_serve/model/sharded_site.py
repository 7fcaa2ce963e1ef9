"""Sites whose tokens are divided over the workers of tensor parallelism.

In a step of many tokens a worker computes the sites of its own tokens alone: the sum of a
sublayer's parts is scattered, and the mix is gathered.  So its bank has its own tokens only.  In a
step of few tokens, where starting two collectives costs more than that saves, every worker computes
all of them.

A graph of any number of tokens cannot choose.  There a site is one operator, which chooses by the
tokens that it is given; a CUDA graph records the choice for its number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import direct_register_custom_op

from attnres_serve.compat import decoder, token_shards
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.model.site_norm import SiteNorm, State


@dataclass
class Division:
    """How the tokens of a model's steps are divided.

    Attributes:
        least: tokens of the smallest step that is divided.
        state: what a site of compiled code has for the next one, within a step.
    """

    least: int
    state: State | None = None

    def divides(self, tokens: int) -> bool:
        """Whether a step of so many tokens is divided."""
        return tokens >= self.least


class Elsewhere(NamedTuple):
    """What a site of compiled code hands on: the state itself is in ``Division``."""

    site: int


class ShardedSite(SiteNorm):
    """A site that is given whole rows of a part of the sum, or of the sum, and gives whole rows.

    Args:
        division: of the tokens.
        rest: see ``SiteNorm``.
    """

    def __init__(self, division: Division, *rest: Any) -> None:
        super().__init__(*rest)
        self.division = division
        self.is_given_a_part = False  # see ``leave_sums``
        # Of the graph an input, and no constant: it is then the same for every layer.
        self.number = torch.tensor([self.site.index], device="cpu")
        _sites[self.site.index] = self

    def forward(
        self, delta: Tensor, residual: Tensor | State | Elsewhere | None = None
    ) -> Tensor | tuple[Tensor, Tensor | State | Elsewhere]:
        if residual is None or not torch.compiler.is_compiling():
            return super().forward(delta, residual)
        embedding = residual if isinstance(residual, Tensor) else None
        normed = torch.ops.vllm.attnres_sharded_site(delta, embedding, self.number)
        self.count()
        return normed, Elsewhere(self.site.index)

    def run(self, delta: Tensor, residual: Tensor | State) -> tuple[Tensor, Tensor | State]:
        tokens = len(delta)
        if not self.division.divides(tokens):
            return super().run(self._whole(delta), residual)
        own = token_shards.own_sum(delta) if self.is_given_a_part else token_shards.own(delta)
        if isinstance(residual, Tensor):  # the embedding
            residual = token_shards.own(residual)
        normed, state = super().run(own, residual)
        return token_shards.gathered(normed, tokens), state

    def given(self, delta: Tensor) -> Tensor:
        return self._whole(delta.clone())  # on a CPU the sum is written over what is added up

    def _whole(self, delta: Tensor) -> Tensor:
        return token_shards.whole_sum(delta) if self.is_given_a_part else delta


def leave_sums(model: nn.Module, spec: AttnResSpec, installed: Mapping[int, SiteNorm]) -> None:
    """Leave the sums of sublayers to the sites behind them, where one layer of theirs adds up.

    A norm between the two needs the sum, as experts do that add up by themselves.

    Args:
        model: vLLM's decoder, on one pipeline stage.
        spec: its depth attention.
        installed: its sites by their index.
    """
    for index, site in installed.items():
        if index and isinstance(site, ShardedSite):
            before = spec.layout.sublayers[index - 1]
            layer = model.layers[before.layer]
            site.is_given_a_part = not _norms_sums(layer) and token_shards.leave_sum(
                layer, before.kind
            )


def _norms_sums(layer: nn.Module) -> bool:
    """Whether a layer norms what a sublayer gives, for which it needs the whole sum."""
    return any(
        decoder.is_norm(child) and not isinstance(child, ShardedSite) for child in layer.children()
    )


# Of the model of this process, by their index: an operator takes no module.
_sites: WeakValueDictionary[int, ShardedSite] = WeakValueDictionary()


def _run(delta: Tensor, embedding: Tensor | None, number: Tensor) -> Tensor:
    site = _sites[int(number)]
    division = site.division
    if not division.divides(len(delta)):
        # The graph takes its tensors back: a state must not hold them, nor a site give them.
        if delta.is_cpu or not site.is_given_a_part:  # elsewhere the sum is a tensor of its own
            delta = delta.clone()
        embedding = None if embedding is None else embedding.clone()
    given = division.state if embedding is None else embedding
    assert given is not None, "the site before has run"
    normed, state = site.run(delta, given)
    division.state = None if site.site.layer is None else state
    return normed


def _fake(delta: Tensor, embedding: Tensor | None, number: Tensor) -> Tensor:
    return torch.empty_like(delta)


direct_register_custom_op("attnres_sharded_site", _run, fake_impl=_fake)
