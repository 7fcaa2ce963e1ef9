"""The depth state as separate tensors: what a site hands on with the torch backend.

A finished block is the last partial sum itself, so nothing is copied, and a compiler sees every
read.  ``bank_state`` keeps the same rows in one tensor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnres_serve.kernels import torch_path
from attnres_serve.kernels.backends import SiteWeights

if TYPE_CHECKING:
    from attnres_serve.residual import SiteNorm

Blocks = tuple[Tensor, ...]


class Answers(NamedTuple):
    """Phase 1 of a group of sites.

    Attributes:
        blocks: how many finished blocks it read; the later ones are read by the sites themselves.
        values: what the backend made of them.
    """

    blocks: int
    values: Any


class DepthState(NamedTuple):
    """What a site hands on.

    Attributes:
        site: index of the site that made it.
        blocks: finished blocks, each ``[tokens, hidden]``, the embedding first.
        partial: running partial sum ``[tokens, hidden]``, None where it has just begun anew.
        answers: phase 1 of the group that runs (two-phase only).
        scores: for each block but those that were finished just now, the logits of the sites ahead
            (score on write only).
    """

    site: int
    blocks: Blocks
    partial: Tensor | None = None
    answers: Answers | None = None
    scores: tuple[Any, ...] = ()

    @classmethod
    def begin(cls, norm: "SiteNorm", embedding: Tensor) -> "DepthState":
        """The state that site 1, ``norm``, receives: the embedding ``[tokens, hidden]``."""
        return cls(0, (embedding,), embedding if norm.site.cumulative else None)

    @classmethod
    def unpack(cls, norm: "SiteNorm", packed: Tensor) -> "DepthState":
        """The state of another pipeline stage, ``[tokens, rows, hidden]``, as ``norm`` gets it."""
        rows = packed.unbind(dim=1)
        count = norm.site.num_blocks - norm.site.opens_block
        return cls(norm.site.index - 1, rows[:count], rows[count] if rows[count:] else None)

    def pack(self) -> Tensor:
        """The rows as one tensor for the next pipeline stage, ``[tokens, rows, hidden]``."""
        return torch.stack(self.sources(), dim=1)

    def sources(self) -> Blocks:
        """What the site that made this state read, ``[tokens, hidden]`` each."""
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def step(self, norm: "SiteNorm", delta: Tensor) -> tuple[Tensor, "DepthState"]:
        """Run the next site.

        Args:
            norm: the site.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The normed mix ``[tokens, hidden]`` and the state behind the site.
        """
        state, opens = self, norm.site.opens_block
        if opens and norm.site.cumulative:  # the sum so far becomes a block, and goes on
            delta = state.add(delta)
            state, opens = state._replace(blocks=(*state.blocks, delta), partial=None), False
        normed, updated, state = state._run(norm, delta, opens)
        blocks, partial = ((*state.blocks, updated), None) if opens else (state.blocks, updated)
        return normed, state._replace(site=norm.site.index, blocks=blocks, partial=partial)

    def add(self, delta: Tensor) -> Tensor:
        """The partial sum with a sublayer's output, ``[tokens, hidden]``."""
        return delta if self.partial is None else self.partial + delta

    def _run(
        self, norm: "SiteNorm", delta: Tensor, opens: bool
    ) -> tuple[Tensor, Tensor, "DepthState"]:
        """The normed mix, the new partial sum, and this state with what is known ahead.

        ``opens``: the new sum is a block by itself, and nothing follows it.
        """
        if not norm.site.mixes:
            updated = self.add(delta)
            return torch_path.rms_norm(updated, norm.weight, norm.variance_epsilon), updated, self
        if norm.algorithm == "score_on_write":
            return self._mix_scored(norm, delta)
        if norm.algorithm == "two_phase" and len(norm.group) > 1:
            return self._two_phase(norm, delta, opens)
        own = self.blocks, self.partial, delta, norm.site_weights()
        return *norm.backend.single_pass(*own), self

    def _mix_scored(self, norm: "SiteNorm", delta: Tensor) -> tuple[Tensor, Tensor, "DepthState"]:
        new = self.blocks[len(self.scores) :]
        scores = (*self.scores, *(norm.backend.score(block, _weights(norm.ahead)) for block in new))
        own = self.blocks, self.partial, delta, norm.site_weights()
        found = norm.backend.mix_scored(scores, len(norm.ahead), *own)
        return *found, self._replace(scores=scores)

    def _two_phase(
        self, norm: "SiteNorm", delta: Tensor, opens: bool
    ) -> tuple[Tensor, Tensor, "DepthState"]:
        weights, backend = norm.site_weights(), norm.backend
        answers: Answers | None
        if norm.position == 0 and opens:
            updated = self.add(delta)
            answers = _phase_1(norm, (*self.blocks, updated))
            if norm.bias is None:
                normed = backend.norm_answer(answers.values, 0, weights, delta)
            else:  # phase 1 knows no bias, which is the completed block's here
                normed, updated = backend.single_pass(self.blocks, self.partial, delta, weights)
            return normed, updated, self._replace(answers=answers)
        answers = self.answers if norm.position else _phase_1(norm, self.blocks)
        assert answers is not None, "the first site of the group ran phase 1"
        since = self.blocks[answers.blocks :]
        own = self.partial, delta, weights
        found = backend.merge(answers.values, norm.position, since, *own)
        return *found, self._replace(answers=answers)


def _phase_1(norm: "SiteNorm", blocks: Blocks) -> Answers:
    return Answers(len(blocks), norm.backend.inter_block(blocks, _weights(norm.group)))


def _weights(sites: Sequence["SiteNorm"]) -> list[SiteWeights]:
    return [site.site_weights() for site in sites]
