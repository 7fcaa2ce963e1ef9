"""The depth state as one bank, written in place: what a site hands on with the cpp and triton
backends.

The rows of the bank are the finished blocks, the embedding first, and behind them the partial sum.
One kernel then serves every number of sources, which it takes as an argument.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attnres_serve.kernels.interface import BankBackend, SiteWeights
from attnres_serve.model.site_context import Learned, SiteContext

Context = SiteContext[BankBackend]


class BankState(NamedTuple):
    """What a site hands on.

    Attributes:
        site: index of the site that made it.
        bank: ``[tokens, slots, hidden]``, slots for the last site of this pipeline stage.
        rows: how many of them are in use.
        queries: of all sites of the stage that mix, as the backend has them; None before the first.
        answers: of phase 1 to the second and later sites of the group that runs, the backend's
            (two-phase only).
    """

    site: int
    bank: Tensor
    rows: int
    queries: Any = None
    answers: Any = None

    @classmethod
    def begin(cls, context: Context, embedding: Tensor) -> "BankState":
        """The state that site 1 receives: the embedding ``[tokens, hidden]``."""
        rows = 2 if context.site.cumulative else 1  # a cumulative sum begins with it
        return cls.unpack(context, embedding.unsqueeze(1).expand(-1, rows, -1))

    @classmethod
    def unpack(cls, context: Context, packed: Tensor) -> "BankState":
        """The state of another pipeline stage, ``[tokens, rows, hidden]``, as a site gets it."""
        tokens, rows, hidden = packed.shape
        bank = packed.new_empty((tokens, context.slots, hidden))
        bank[:, :rows] = packed
        return cls(context.site.index - 1, bank, rows)

    def pack(self) -> Tensor:
        """The rows in use for the next pipeline stage, ``[tokens, rows, hidden]``."""
        return self.bank[:, : self.rows].contiguous()

    def sources(self) -> tuple[Tensor, ...]:
        """What the site that made this state read, ``[tokens, hidden]`` each."""
        rows: tuple[Tensor, ...] = self.bank[:, : self.rows].unbind(dim=1)
        return rows

    def add_last(self, context: Context, delta: Tensor) -> tuple[Tensor, "BankState"]:
        """Run a final site that does not mix.

        Args:
            context: of the site.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The partial sum ``[tokens, hidden]`` and the state behind the site.
        """
        row = context.site.num_sources - 1  # where the partial sum is
        updated = delta if row == self.rows else self.bank[:, row] + delta
        return updated, self._replace(site=context.site.index, rows=row + 1)

    def step(
        self, context: Context, ahead: Sequence[Learned], delta: Tensor
    ) -> tuple[Tensor, "BankState"]:
        """Run the next site, which mixes.

        Args:
            context: of the site.
            ahead: the parameters of this site and of the later ones of its stage that mix.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The normed mix ``[tokens, hidden]`` and the state behind the site.
        """
        site, bank, backend = context.site, self.bank, context.backend
        row = context.bank_slot.row  # where the partial sum is
        if site.opens_block and site.cumulative:  # the sum so far becomes a block, and goes on
            # Read before it is written: of a row read afterwards, inductor has made wrong code in
            # pieces.
            total = bank[:, row - 1] + delta
            backend.add_to_row(delta, bank, row - 1)
            delta = total
        state = self._replace(site=site.index, rows=row + 1)
        if state.queries is None:
            sites = [later.site_weights() for later in ahead]
            state = state._replace(queries=backend.queries_of(sites))
        weights = ahead[0].site_weights()
        if context.group > 1:
            return state._two_phase(context, delta, weights)
        return backend.single_pass(delta, bank, state.queries, weights, context.bank_slot), state

    def _two_phase(
        self, context: Context, delta: Tensor, weights: SiteWeights
    ) -> tuple[Tensor, "BankState"]:
        """The normed mix, and this state with the answers of the group."""
        backend, slot = context.backend, context.bank_slot
        if context.position == 0:
            completes = not context.site.reads_partial
            normed, answers = backend.phase_1(
                delta, self.bank, self.queries, context.group, weights, slot, completes
            )
            return normed, self._replace(answers=answers)
        return backend.phase_2(delta, self.bank, self.answers, self.queries, weights, slot), self
