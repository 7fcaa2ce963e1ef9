"""The depth state of the torch backend: separate tensors.

A finished block is the last partial sum, so nothing is copied, and a compiler sees every read.
``bank_state`` keeps the same rows in one tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres_serve.kernels.interface import SiteWeights, TensorBackend
from attnres_serve.model.site_context import Learned, SiteContext

Blocks = tuple[Tensor, ...]
Context = SiteContext[TensorBackend]


class Answers(NamedTuple):
    """Phase 1 of a group of sites.

    Attributes:
        blocks: number of finished blocks that it read; the sites read the later ones.
        values: the answers in the backend's form.
    """

    blocks: int
    values: Any


class DepthState(NamedTuple):
    """The depth state that a site returns.

    Attributes:
        site: index of the site that returned it.
        blocks: finished blocks, each ``[tokens, hidden]``, the embedding first.
        partial: running partial sum ``[tokens, hidden]``, None just after a block is finished.
        answers: phase 1 of the running group (two-phase only).
    """

    site: int
    blocks: Blocks
    partial: Tensor | None = None
    answers: Answers | None = None

    @classmethod
    def begin(cls, context: Context, embedding: Tensor) -> "DepthState":
        """The state that site 1 receives: the embedding ``[tokens, hidden]``."""
        return cls(0, (embedding,), embedding if context.site.cumulative else None)

    @classmethod
    def unpack(cls, context: Context, packed: Tensor) -> "DepthState":
        """The state from the packed state ``[tokens, rows, hidden]`` of another pipeline stage."""
        site, rows = context.site, packed.unbind(dim=1)
        count = site.num_blocks - site.opens_block
        return cls(site.index - 1, rows[:count], rows[count] if rows[count:] else None)

    def pack(self) -> Tensor:
        """The rows as one tensor for the next pipeline stage, ``[tokens, rows, hidden]``."""
        return torch.stack(self.sources(), dim=1)

    def sources(self) -> Blocks:
        """The sources of the site that returned this state, each ``[tokens, hidden]``."""
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def add(self, delta: Tensor) -> Tensor:
        """The partial sum with a sublayer's output, ``[tokens, hidden]``."""
        return delta if self.partial is None else self.partial + delta

    def add_last(self, context: Context, delta: Tensor) -> tuple[Tensor, "DepthState"]:
        """Run a final site that does not mix.

        Args:
            context: the context of the site.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The partial sum ``[tokens, hidden]`` and the state after the site.
        """
        updated = self.add(delta)
        return updated, self._replace(site=context.site.index, partial=updated)

    def step(
        self, context: Context, ahead: Sequence[Learned], delta: Tensor
    ) -> tuple[Tensor, "DepthState"]:
        """Run the next site, which mixes.

        Args:
            context: the context of the site.
            ahead: the parameters of this site and of the later mixing sites of its stage.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The normed mix ``[tokens, hidden]`` and the state after the site.
        """
        state, site = self, context.site
        opens = site.opens_block
        if opens and site.cumulative:  # the sum so far becomes a block, and goes on
            delta = state.add(delta)
            state, opens = state._replace(blocks=(*state.blocks, delta), partial=None), False
        if context.group > 1:
            normed, updated, state = state._two_phase(context, ahead, delta, opens)
        else:
            normed, updated = context.backend.single_pass(
                state.blocks, state.partial, delta, ahead[0].site_weights()
            )
        blocks, partial = ((*state.blocks, updated), None) if opens else (state.blocks, updated)
        return normed, state._replace(site=site.index, blocks=blocks, partial=partial)

    def _two_phase(
        self, context: Context, ahead: Sequence[Learned], delta: Tensor, opens: bool
    ) -> tuple[Tensor, Tensor, "DepthState"]:
        """The normed mix, the new partial sum, and this state with the answers of the group.

        ``opens``: whether the new sum is a finished block, after which the partial sum is empty.
        """
        weights, backend = ahead[0].site_weights(), context.backend
        answers: Answers | None
        if context.position == 0 and opens:
            updated = self.add(delta)
            answers = _phase_1(context, ahead, (*self.blocks, updated))
            normed = backend.norm_answer(answers.values, weights, delta)
            return normed, updated, self._replace(answers=answers)
        answers = self.answers if context.position else _phase_1(context, ahead, self.blocks)
        assert answers is not None, "the first site of the group ran phase 1"
        since = self.blocks[answers.blocks :]
        normed, updated = backend.phase_2(
            answers.values, context.position, since, self.partial, delta, weights
        )
        return normed, updated, self._replace(answers=answers)


def _phase_1(context: Context, ahead: Sequence[Learned], blocks: Blocks) -> Answers:
    group = _weights(ahead[: context.group])  # this site comes first
    return Answers(len(blocks), context.backend.phase_1(blocks, group))


def _weights(sites: Sequence[Learned]) -> list[SiteWeights]:
    return [site.site_weights() for site in sites]
