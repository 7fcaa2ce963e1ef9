"""The depth state of the cpp and triton backends: one bank, written in place.

The rows of the bank are the finished blocks, the embedding first, and after them the partial sum.
One kernel serves any number of sources, which it takes as an argument.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attnres_serve.kernels.interface import BankBackend, SiteWeights
from attnres_serve.model.site_context import Learned, SiteContext

Context = SiteContext[BankBackend]


class BankState(NamedTuple):
    """The depth state that a site returns.

    Attributes:
        site: index of the site that returned it.
        bank: ``[tokens, slots, hidden]``, with enough slots for the last site of this pipeline
            stage.
        rows: number of slots in use.
        queries: the queries of all mixing sites of the stage in the backend's form; None before the
            first one runs.
        answers: the phase-1 answers for the second and later sites of the running group, in the
            backend's form (two-phase only).
    """

    site: int
    bank: Tensor
    rows: int
    queries: Any = None
    answers: Any = None

    @classmethod
    def begin(cls, context: Context, embedding: Tensor) -> "BankState":
        """The state that site 1 receives: the embedding ``[tokens, hidden]``."""
        rows = 2 if context.site.cumulative else 1  # a cumulative sum begins with the embedding
        return cls.unpack(context, embedding.unsqueeze(1).expand(-1, rows, -1))

    @classmethod
    def unpack(cls, context: Context, packed: Tensor) -> "BankState":
        """The state from the packed state ``[tokens, rows, hidden]`` of another pipeline stage."""
        tokens, rows, hidden = packed.shape
        bank = packed.new_empty((tokens, context.slots, hidden))
        bank[:, :rows] = packed
        return cls(context.site.index - 1, bank, rows)

    def pack(self) -> Tensor:
        """The rows in use for the next pipeline stage, ``[tokens, rows, hidden]``."""
        return self.bank[:, : self.rows].contiguous()

    def sources(self) -> tuple[Tensor, ...]:
        """The sources of the site that returned this state, each ``[tokens, hidden]``."""
        rows: tuple[Tensor, ...] = self.bank[:, : self.rows].unbind(dim=1)
        return rows

    def add_last(self, context: Context, delta: Tensor) -> tuple[Tensor, "BankState"]:
        """Run a final site that does not mix.

        Args:
            context: the context of the site.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The partial sum ``[tokens, hidden]`` and the state after the site.
        """
        row = context.site.num_sources - 1  # where the partial sum is
        updated = delta if row == self.rows else self.bank[:, row] + delta
        return updated, self._replace(site=context.site.index, rows=row + 1)

    def step(
        self, context: Context, ahead: Sequence[Learned], delta: Tensor
    ) -> tuple[Tensor, "BankState"]:
        """Run the next site, which mixes.

        Args:
            context: the context of the site.
            ahead: the parameters of this site and of the later mixing sites of its stage.
            delta: output of the sublayer before it, ``[tokens, hidden]``.

        Returns:
            The normed mix ``[tokens, hidden]`` and the state after the site.
        """
        site, bank, backend = context.site, self.bank, context.backend
        row = context.bank_slot.row  # where the partial sum is
        if site.opens_block and site.cumulative:  # the sum so far becomes a block, and goes on
            # Read before writing: inductor (piecewise) generated wrong code for a read after the
            # write.
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
