"""Backends: who computes a site.  Algorithm and backend are separate choices.

A site adds the sublayer's output to the partial sum, attends to its sources and norms the mix.  The
algorithms differ in what is known before that.  A backend is a module; ``IN_PLACE`` says on what it
works.

The torch backend works on separate tensors and writes to none of its arguments:

``single_pass(blocks, partial, delta, weights) -> normed, updated``
    Nothing is known: the site attends to all sources at once.
``inter_block(blocks, sites) -> answers``
    Two-phase, phase 1: a group of sites attends to the finished blocks in one pass over them.
``norm_answer(answers, position, weights, like) -> normed``
    A site whose sources are those blocks only: its answer of phase 1, normed.
``merge(answers, position, blocks, partial, delta, weights) -> normed, updated``
    Two-phase, phase 2: the answer, the blocks finished since and the partial sum are merged.
``score(block, sites) -> scores``
    Score on write: the logits of a finished block for all sites ahead.
``mix_scored(scores, ahead, blocks, partial, delta, weights) -> normed, updated``
    The blocks are mixed by logits that are known; only the partial sum is scored.

Shapes: ``blocks`` are ``n`` tensors ``[T, d]`` of one dtype, the embedding first; ``partial`` is
the running partial sum ``[T, d]``, None where a block has just begun; ``delta`` is the sublayer's
output ``[T, d]``; ``normed`` and ``updated`` (the new partial sum, rounded to the activation dtype
before it is a source) are ``[T, d]`` in that dtype.  ``answers`` and ``scores`` belong to the
backend; ``position`` counts the sites of a phase 1, and ``ahead`` is how many sites are ahead, the
one that runs included: all blocks are scored for the same last site.

The backends cpp and triton work in place, on one bank ``[T, slots, d]`` whose rows are the finished
blocks and then the partial sum:

``queries_of(sites) -> queries``
    What the other functions need of all sites of a pipeline stage; ``position`` is one of them.
``single_pass(delta, bank, queries, position, site, place) -> normed``
    Add ``delta`` to its row, attend to all rows up to it, norm the mix.
``open_group(delta, bank, queries, position, count, site, place, completes) -> normed, answers``
    The first of ``count`` sites, as ``single_pass``, and phase 1 of the others.  ``completes``: its
    row is a finished block now, and a source of the others as well.
``merge(delta, bank, answers, number, first, queries, position, site, place) -> normed``
    The answer with that number stands for the rows before ``first``.
``score_rows(bank, scores, queries, position, first, count, site) -> None``
    Logits of ``count`` finished rows for the site at ``position`` and all behind it, written to
    ``scores [T, sites, slots]`` float32.
``mix_scored(delta, bank, scores, queries, position, site, place) -> normed``
    The logits of all rows but the last are taken from there.
``add_to_row(delta, bank, row) -> None``
    Nothing is attended to.

They may write ``normed`` over ``delta``, as vLLM's fused add + RMSNorm does (cpp does so); it must
not share memory with the bank.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("cpp", "torch", "triton")


class SiteWeights(NamedTuple):
    """What a site has learned.

    Attributes:
        query: pseudo-query ``[d]`` float32.
        key_norm: weight of the key norm ``[d]`` float32.
        bias: ``[1]`` float32, added to the logit of the last source; None for none.
        norm_weight: weight ``[d]`` of the RMSNorm behind the mix.
        logit_scale: factor of the logits.  Only its product with query and key norm matters;
            backends multiply in every pass, so that weights updated in place take effect.
        key_eps: epsilon of the key norm.
        norm_eps: that of the RMSNorm.
    """

    query: "Tensor"
    key_norm: "Tensor"
    bias: "Tensor | None"
    norm_weight: "Tensor"
    logit_scale: float
    key_eps: float
    norm_eps: float


class Place(NamedTuple):
    """Where in a bank a site works.

    Attributes:
        row: the row that the sublayer's output is added to.
        fresh: whether it begins there.
    """

    row: int
    fresh: bool


class BackendError(RuntimeError):
    """A backend that cannot run on this machine; the message says why and what to do."""


def load(name: str) -> ModuleType:
    """The backend of that name, ready to run.

    Args:
        name: one of ``BACKENDS``.

    Raises:
        BackendError: it cannot run on this machine.
    """
    backend = importlib.import_module(f"attnres_serve.kernels.{name}_backend")
    backend.prepare()
    return backend
