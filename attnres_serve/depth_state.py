"""The depth state as separate tensors: what a site hands on with the torch and cpp backends.

A finished block is the last partial sum itself, so nothing is copied, and a compiler sees every
read.  ``bank_state`` keeps the same rows in one tensor.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnres_serve.kernels import torch_path

if TYPE_CHECKING:
    from attnres_serve.residual import SiteNorm

Blocks = tuple[Tensor, ...]


class Answers(NamedTuple):
    """Phase 1 of an open block.

    Attributes:
        site: index of its first site.
        values: what the backend made of it.
    """

    site: int
    values: Any


class DepthState(NamedTuple):
    """What a site hands on.

    Attributes:
        site: index of the site that made it.
        blocks: finished blocks, each ``[tokens, hidden]``, the embedding first.
        partial: running partial sum ``[tokens, hidden]``, None where it has just begun anew.
        answers: phase 1 of the open block (two-phase only).
    """

    site: int
    blocks: Blocks
    partial: Tensor | None = None
    answers: Answers | None = None

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
        rows = self.blocks if self.partial is None else (*self.blocks, self.partial)
        return torch.stack(rows, dim=1)

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
            state, opens = DepthState(state.site, (*state.blocks, delta)), False
        normed, updated, answers = state._run(norm, delta, opens)
        blocks, partial = ((*state.blocks, updated), None) if opens else (state.blocks, updated)
        return normed, DepthState(norm.site.index, blocks, partial, answers)

    def add(self, delta: Tensor) -> Tensor:
        """The partial sum with a sublayer's output, ``[tokens, hidden]``."""
        return delta if self.partial is None else self.partial + delta

    def _run(
        self, norm: "SiteNorm", delta: Tensor, opens: bool
    ) -> tuple[Tensor, Tensor, Answers | None]:
        """The normed mix, the new partial sum and the phase 1 of the open block.

        ``opens``: the new sum is a block by itself, and nothing follows it.
        """
        if not norm.site.mixes:
            updated = self.add(delta)
            own = norm.weight, norm.variance_epsilon
            return torch_path.rms_norm(updated, *own), updated, None
        weights, backend = norm.site_weights(), norm.backend
        # Phase 1 knows no bias, so where the last source is a block, the site attends on its own.
        if norm.algorithm == "single_pass" or (opens and norm.bias is not None):
            return *backend.single_pass(self.blocks, self.partial, delta, weights), None
        if opens:
            updated = self.add(delta)
            answers = _phase_1(norm, (*self.blocks, updated))
            return backend.norm_answer(answers.values, 0, weights, delta), updated, answers
        answers = self.answers or _phase_1(norm, self.blocks)
        position = norm.site.index - answers.site
        merged = backend.merge(answers.values, position, self.partial, delta, weights)
        return *merged, answers


def _phase_1(norm: "SiteNorm", blocks: Blocks) -> Answers:
    sites = [one.site_weights() for one in norm.group]
    return Answers(norm.site.index, norm.backend.inter_block(blocks, sites))
