"""The depth state as one bank, written in place: what a site hands on with the triton backend.

The rows of the bank are the finished blocks, the embedding first, and behind them the partial sum.
One kernel then serves every number of sources, which it takes as an argument.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnres_serve.kernels import torch_path, triton_backend

if TYPE_CHECKING:
    from attnres_serve.residual import SiteNorm


class Ahead(NamedTuple):
    """What is known ahead of the sites of an open block.

    Attributes:
        site: index of the first of them.
        queries: pseudo-queries times key norms and logit scale, ``[sites, hidden]`` float32.
        answers: their phase 1, where it was run (two-phase only).
    """

    site: int
    queries: Tensor
    answers: triton_backend.Answers | None = None


class BankState(NamedTuple):
    """What a site hands on.

    Attributes:
        site: index of the site that made it.
        bank: ``[tokens, slots, hidden]``, slots for the last site of this pipeline stage.
        rows: how many of them are in use.
        ahead: of the open block; None where nothing was needed yet.
    """

    site: int
    bank: Tensor
    rows: int
    ahead: Ahead | None = None

    @classmethod
    def begin(cls, norm: "SiteNorm", embedding: Tensor) -> "BankState":
        """The state that site 1, ``norm``, receives: the embedding ``[tokens, hidden]``."""
        rows = 2 if norm.site.cumulative else 1  # a cumulative sum begins with it
        return cls.unpack(norm, embedding.unsqueeze(1).expand(-1, rows, -1))

    @classmethod
    def unpack(cls, norm: "SiteNorm", packed: Tensor) -> "BankState":
        """The state of another pipeline stage, ``[tokens, rows, hidden]``, as ``norm`` gets it."""
        tokens, rows, hidden = packed.shape
        bank = packed.new_empty((tokens, norm.slots, hidden))
        bank[:, :rows] = packed
        return cls(norm.site.index - 1, bank, rows)

    def pack(self) -> Tensor:
        """The rows in use for the next pipeline stage, ``[tokens, rows, hidden]``."""
        return self.bank[:, : self.rows].contiguous()

    def step(self, norm: "SiteNorm", delta: Tensor) -> tuple[Tensor, "BankState"]:
        """Run the next site.

        Args:
            norm: the site.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The normed mix ``[tokens, hidden]`` and the state behind the site.
        """
        site, bank, rows = norm.site, self.bank, self.rows
        row = site.num_sources - 1  # where the partial sum is
        if site.opens_block and site.cumulative:  # the sum so far becomes a block, and goes on
            triton_backend.complete_row(delta, bank, row - 1, False)
            delta = bank[:, row - 1].clone()
        fresh = row == rows
        state = BankState(site.index, bank, row + 1, self._ahead(norm))
        if not site.mixes:
            updated = delta if fresh else bank[:, row] + delta
            return torch_path.rms_norm(updated, norm.weight, norm.variance_epsilon), state
        return state._mix(norm, delta, row, fresh)

    def _ahead(self, norm: "SiteNorm") -> Ahead | None:
        """What is known ahead of this site, made anew where a block opens."""
        if not norm.site.mixes or (self.ahead and not norm.site.opens_block):
            return self.ahead
        folded = [one.query * one.key_norm * one.logit_scale for one in norm.group]
        return Ahead(norm.site.index, torch.stack(folded))

    def _mix(
        self, norm: "SiteNorm", delta: Tensor, row: int, fresh: bool
    ) -> tuple[Tensor, "BankState"]:
        ahead, state = self.ahead, self
        assert ahead is not None, "every site that mixes has a query"
        position, weights = norm.site.index - ahead.site, norm.site_weights()
        query = ahead.queries[position]
        completes = not norm.site.reads_partial  # a block, which is the last source
        # Phase 1 knows no bias, so where the last source is a block, the site attends on its own.
        if norm.algorithm == "single_pass" or (completes and norm.bias is not None):
            normed = triton_backend.single_pass(delta, self.bank, query, weights, row, fresh)
            return normed, state
        if completes:
            triton_backend.complete_row(delta, self.bank, row, fresh)
        answers = ahead.answers
        if answers is None:
            queries, blocks = ahead.queries[position:], norm.site.num_blocks
            answers = triton_backend.inter_block(self.bank, queries, blocks, norm.key_eps)
            state = self._replace(ahead=Ahead(norm.site.index, queries, answers))
            position = 0
        if completes:
            return triton_backend.norm_answer(answers, position, weights), state
        return triton_backend.merge(
            delta, self.bank, answers, position, query, weights, row, fresh
        ), state
