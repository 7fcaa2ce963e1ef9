"""The functions that a backend has for sites.

A site adds the sublayer's output to the partial sum, attends to its sources and norms the mix.  The
algorithms differ in what is known before that.  A backend is a module that has the functions of one
of the two protocols below; ``IN_PLACE`` says of which.

Shapes: ``T`` tokens, ``d`` hidden size, ``n`` finished blocks, ``S`` sites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:  # the command line names backends without torch
    from collections.abc import Sequence

    import torch
    from torch import Tensor

# The bias of a source that is not read: the least finite float32.  Its weight is exactly 0, and no
# difference of two such logits is NaN, as it is of infinities.
MASKED: Final = -3.4028234663852886e38


class SiteWeights(NamedTuple):
    """What a site has learned.

    Attributes:
        query: pseudo-query ``[d]`` float32.
        key_norm: weight of the key norm ``[d]`` float32.
        bias: ``[n]`` float32, added to the logits of the site's ``n`` sources, in the order of
            ``Site.sources``; None for none.  ``MASKED`` leaves a source out; one at least is read.
            The sites of a model all have one, or none has.
        norm_weight: weight ``[d]`` of the RMSNorm behind the mix, in float32, bfloat16 or float16,
            whatever the activations' dtype is.
        logit_scale: factor of the logits.  Only its product with query and key norm matters;
            backends multiply in every pass, so that weights updated in place take effect.
        key_eps: epsilon of the key norm.
        norm_eps: that of the RMSNorm.
    """

    query: Tensor
    key_norm: Tensor
    bias: Tensor | None
    norm_weight: Tensor
    logit_scale: float
    key_eps: float
    norm_eps: float


class BankSlot(NamedTuple):
    """Where in a pipeline stage a site works.

    Attributes:
        row: the row of the bank that the sublayer's output is added to.
        fresh: whether it begins there.
        position: of the site among the sites of ``queries_of``.
        first: the first row that phase 1 has not read; 0 where there was none.
        number: of the site's answer among those of its group's phase 1.
        numbers: row, position, first and number as ``[4]`` int64 on the CPU.  A graph that takes
            them from there is the same for every layer, where integers would be constants of it.
    """

    row: int
    fresh: bool
    position: int
    first: int
    number: int
    numbers: Tensor


def slot_of(row: int, fresh: bool, position: int = 0, first: int = 0, number: int = 0) -> BankSlot:
    """A slot, with its numbers as a tensor."""
    import torch

    # Models are made with another default device.
    known = row, position, first, number
    return BankSlot(row, fresh, *known[1:], torch.tensor(known, dtype=torch.int64, device="cpu"))


class BackendError(RuntimeError):
    """A backend that cannot run on this machine; the message says why and what to do."""


class _AnyBackend(Protocol):
    """What both kinds of backends have."""

    def prepare(self, dtype: torch.dtype | None = None) -> None:
        """Make the backend ready to run.

        Args:
            dtype: of the activations; None for any that it takes.

        Raises:
            BackendError: it cannot run on this machine, or not in that dtype.
        """


class TensorBackend(_AnyBackend, Protocol):
    """A backend that works on separate tensors and writes to none of its arguments: torch.

    Arguments of several functions:
        blocks: ``n`` tensors ``[T, d]`` of one dtype, the activations', the embedding first.
        partial: the running partial sum ``[T, d]`` in that dtype; None if a block has just begun.
        delta: the sublayer's output ``[T, d]`` in that dtype.
        weights: of the site that runs.
        sites: the weights of ``S`` sites.
        answers: in a form of the backend's choice.

    Results of several functions:
        normed: the normed mix ``[T, d]`` in the activations' dtype.
        updated: the new partial sum ``[T, d]``, rounded to that dtype before it is a source.
    """

    @property
    def IN_PLACE(self) -> Literal[False]: ...

    def single_pass(
        self,
        blocks: Sequence[Tensor],
        partial: Tensor | None,
        delta: Tensor,
        weights: SiteWeights,
    ) -> tuple[Tensor, Tensor]:
        """Attend to all sources at once, nothing being known; return normed and updated."""

    def phase_1(self, blocks: Sequence[Tensor], sites: Sequence[SiteWeights]) -> Any:
        """Two-phase, phase 1: a group of sites attends to the finished blocks in one pass.

        Returns:
            The answers of the sites.
        """

    def norm_answer(self, answers: Any, weights: SiteWeights, like: Tensor) -> Tensor:
        """Norm the answer of a group's first site, whose sources are the blocks of phase 1 only.

        Args:
            answers: of the group.
            weights: of the site.
            like: a tensor in the activations' dtype.

        Returns:
            normed
        """

    def phase_2(
        self,
        answers: Any,
        position: int,
        blocks: Sequence[Tensor],
        partial: Tensor | None,
        delta: Tensor,
        weights: SiteWeights,
    ) -> tuple[Tensor, Tensor]:
        """Two-phase, phase 2: merge the answer, the blocks since and the partial sum.

        Args:
            answers: of the group.
            position: of the site in the group.
            blocks: finished since phase 1, none or more.
            partial, delta, weights: see above.

        Returns:
            normed and updated
        """


class BankBackend(_AnyBackend, Protocol):
    """A backend that works in place on a bank: cpp and triton.

    A function may write ``normed`` over ``delta``, as vLLM's fused add + RMSNorm does (cpp does
    so); ``delta`` must not share memory with the bank.

    Arguments of several functions:
        delta: the sublayer's output ``[T, d]`` in the activations' dtype.
        bank: ``[T, slots, d]`` in that dtype; its rows are the finished blocks and then the partial
            sum.
        queries: of all sites of a pipeline stage, see ``queries_of``.
        site: the weights of the site that runs.
        slot: where it works, see ``slot_of``.
        answers: in a form of the backend's choice.

    Result of several functions:
        normed: the normed mix ``[T, d]`` in the activations' dtype.
    """

    @property
    def IN_PLACE(self) -> Literal[True]: ...

    def queries_of(self, sites: Sequence[SiteWeights]) -> Any:
        """The queries of all sites of a pipeline stage, as the other functions take them.

        Returns:
            A form of the backend's choice.
        """

    def single_pass(
        self,
        delta: Tensor,
        bank: Tensor,
        queries: Any,
        site: SiteWeights,
        slot: BankSlot,
    ) -> Tensor:
        """Add ``delta`` to its row, attend to all rows up to it, return normed."""

    def phase_1(
        self,
        delta: Tensor,
        bank: Tensor,
        queries: Any,
        count: int,
        site: SiteWeights,
        slot: BankSlot,
        completes: bool,
    ) -> tuple[Tensor, Any]:
        """Run the first site of a group, as ``single_pass``, and phase 1 of the others.

        Args:
            delta, bank, queries, site, slot: see above.
            count: sites of the group.
            completes: whether the site's row is a finished block now, and so a source of the
                others as well.

        Returns:
            normed, and the answers of the other sites.
        """

    def phase_2(
        self,
        delta: Tensor,
        bank: Tensor,
        answers: Any,
        queries: Any,
        site: SiteWeights,
        slot: BankSlot,
    ) -> Tensor:
        """Run a later site of a group: its answer stands for the rows before the slot's first.

        Args:
            delta, bank, queries, site, slot: see above.
            answers: of the group.

        Returns:
            normed
        """

    def add_to_row(self, delta: Tensor, bank: Tensor, row: int) -> None:
        """Add ``delta`` to a row of the bank; nothing is attended to."""


Backend = TensorBackend | BankBackend
