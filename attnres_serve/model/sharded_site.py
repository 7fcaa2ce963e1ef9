"""Sites whose tokens are divided over the workers of tensor parallelism.

In a step of many tokens a worker computes the sites of its share of the tokens: the sum of a
sublayer's partial outputs is scattered, and the mix is gathered.  So its bank has only these
tokens.  In a step of few tokens, where starting two collectives costs more than that saves, every
worker computes all tokens.

A graph for any number of tokens cannot choose.  There a site is one operator, which chooses by the
number of its tokens; a CUDA graph records the choice for its number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import direct_register_custom_op

from attnres_serve.compat import decoder, engine_config, token_shards
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.model.site_norm import SiteNorm, State
from attnres_serve.sentences import amount


@dataclass
class Division:
    """The division of the tokens of a model's steps.

    Attributes:
        least: tokens of the smallest divided step.
        state: within a step of compiled code, the state from the last site for the next one.
    """

    least: int
    state: State | None = None

    def divides(self, tokens: int) -> bool:
        """Whether a step of this number of tokens is divided."""
        return tokens >= self.least


class Elsewhere(NamedTuple):
    """The placeholder that a site of compiled code returns; the state is in ``Division``."""

    site: int


class ShardedSite(SiteNorm):
    """A site that takes and returns all tokens; it may have to sum its input over workers.

    Args:
        division: the division of the tokens.
        rest: see ``SiteNorm``.
    """

    def __init__(self, division: Division, *rest: Any) -> None:
        super().__init__(*rest)
        self.division = division
        self.reduces_delta = False  # whether it sums over workers, see ``leave_sums``
        # A graph input, not a constant, so that all layers share one graph.
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
        share = (
            token_shards.local_rows_of_sum(delta)
            if self.reduces_delta
            else token_shards.local_rows(delta)
        )
        if isinstance(residual, Tensor):  # the embedding
            residual = token_shards.local_rows(residual)
        normed, state = super().run(share, residual)
        return token_shards.gathered(normed, tokens), state

    def whole_delta(self, delta: Tensor) -> Tensor:
        return self._whole(delta.clone())  # on a CPU the sum overwrites its input

    def _whole(self, delta: Tensor) -> Tensor:
        return token_shards.whole_sum(delta) if self.reduces_delta else delta


def leave_sums(model: nn.Module, spec: AttnResSpec, installed: Mapping[int, SiteNorm]) -> None:
    """Leave the sum of a sublayer over workers to the site after it, where one layer adds it up.

    This is not possible with a norm between the two, which needs the sum, nor with experts that
    sum by themselves.

    Args:
        model: vLLM's decoder, on one pipeline stage.
        spec: its depth attention.
        installed: its sites by index.
    """
    for index, site in installed.items():
        if index and isinstance(site, ShardedSite):
            before = spec.layout.sublayers[index - 1]
            layer = model.layers[before.layer]
            site.reduces_delta = not _norms_sums(layer) and token_shards.leave_sum(
                layer, before.kind
            )


def described(vllm_config: Any, installed: Mapping[int, SiteNorm], least: int) -> str:
    """What the log says of sharded sites: from how many tokens on, and the size of their bank.

    Args:
        vllm_config: vLLM's configuration.
        installed: the sites of a pipeline stage by index.
        least: tokens of the smallest divided step.
    """
    rows = max(site.context.slots for site in installed.values())
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    sharded, whole = (
        amount(rows * engine_config.bytes_of_a_row(vllm_config, size))
        for size in (token_shards.most(vllm_config), tokens)
    )
    return f", sites sharded from {least} tokens on: a bank of {sharded} instead of {whole}"


def _norms_sums(layer: nn.Module) -> bool:
    """Whether a layer norms the output of a sublayer, which needs the whole sum."""
    return any(
        decoder.is_norm(child) and not isinstance(child, ShardedSite) for child in layer.children()
    )


# The sites of this process's model by index: an operator takes no module.
_sites: WeakValueDictionary[int, ShardedSite] = WeakValueDictionary()


def _run(delta: Tensor, embedding: Tensor | None, number: Tensor) -> Tensor:
    site = _sites[int(number)]
    division = site.division
    if not division.divides(len(delta)):
        # The graph reuses its tensors: a state must not hold them, nor a site return them.
        if delta.is_cpu or not site.reduces_delta:  # otherwise the sum is a new tensor
            delta = delta.clone()
        embedding = None if embedding is None else embedding.clone()
    residual = division.state if embedding is None else embedding
    assert residual is not None, "the site before has run"
    normed, state = site.run(delta, residual)
    division.state = None if site.site.layer is None else state
    return normed


def _fake(delta: Tensor, embedding: Tensor | None, number: Tensor) -> Tensor:
    return torch.empty_like(delta)


direct_register_custom_op("attnres_sharded_site", _run, fake_impl=_fake)
