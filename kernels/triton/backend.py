"""The triton backend: the Triton kernels as torch operators; see ``interface``.

The queries of a pipeline stage come folded in one tensor ``[S, d]`` float32, and its biases, if it
has any, in another ``[S, n]``, with zeros behind those of a site's sources.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from attnres_serve.kernels.interface import BackendError, BankSlot, SiteWeights

Answers = tuple[Tensor, Tensor]  # [S, T, d] in the activation dtype, log-sum-exps [S, T] float32
Queries = tuple[Tensor, Tensor | None]
IN_PLACE: Final = True
_ops = torch.ops.attnres_serve
_library: torch.library.Library | None = None


_SLOT = "Tensor slot, bool fresh"
_NORM = "Tensor? bias, Tensor norm_weight, float key_eps, float norm_eps"
SCHEMAS = {
    "triton_fold": "(Tensor[] queries, Tensor[] key_norms, float logit_scale) -> Tensor",
    "triton_pad": "(Tensor[] biases) -> Tensor",
    "triton_single_pass": (
        f"(Tensor delta, Tensor(a!) bank, Tensor queries, {_SLOT}, {_NORM}) -> Tensor"
    ),
    "triton_phase_1": (
        "(Tensor delta, Tensor(a!) bank, Tensor queries, int count, bool completes,"
        f" {_SLOT}, {_NORM}) -> (Tensor, Tensor, Tensor)"
    ),
    "triton_phase_2": (
        "(Tensor delta, Tensor(a!) bank, Tensor answers, Tensor log_sums,"
        f" Tensor queries, {_SLOT}, {_NORM}) -> Tensor"
    ),
    "triton_add_to_row": "(Tensor delta, Tensor(a!) bank, int row) -> ()",
}


def prepare(dtype: torch.dtype | None = None) -> None:
    """Register the operators, for any dtype.

    Raises:
        BackendError: there is no Triton, or neither a CUDA device nor Triton's interpreter.
    """
    global _library
    if _library is not None:
        return
    try:
        from attnres_serve.kernels.triton import common, operators
    except ImportError as error:
        raise BackendError(
            f"the triton backend needs Triton ({error}); choose the torch backend."
        ) from error
    if not (torch.cuda.is_available() or common.INTERPRETED):
        raise BackendError("the triton backend needs a CUDA device; choose the torch backend.")
    _library = torch.library.Library("attnres_serve", "FRAGMENT")
    key = "CPU" if common.INTERPRETED else "CUDA"
    for name, schema in SCHEMAS.items():
        function = getattr(operators, name.removeprefix("triton_"))
        _library.define(name + schema)
        _library.impl(name, function, key)
        fake = _FAKES.get(name, _nothing)
        torch.library.register_fake(f"attnres_serve::{name}", fake, lib=_library)


def queries_of(sites: Sequence[SiteWeights]) -> Queries:
    """Pseudo-queries times key norms and logit scale; and biases, or None.

    Operators, because a compiler would launch a kernel for every one of them.
    """
    queries, key_norms = [site.query for site in sites], [site.key_norm for site in sites]
    biases = [site.bias for site in sites if site.bias is not None]
    folded = _ops.triton_fold(queries, key_norms, sites[0].logit_scale)
    return folded, _ops.triton_pad(biases) if biases else None


def single_pass(
    delta: Tensor,
    bank: Tensor,
    queries: Queries,
    site: SiteWeights,
    slot: BankSlot,
) -> Tensor:
    return _ops.triton_single_pass(delta, bank, queries[0], *_site(site, slot))


def phase_1(
    delta: Tensor,
    bank: Tensor,
    queries: Queries,
    count: int,
    site: SiteWeights,
    slot: BankSlot,
    completes: bool,
) -> tuple[Tensor, Answers]:
    folded, biases = queries
    arguments = _site(site._replace(bias=biases), slot)
    normed, *answers = _ops.triton_phase_1(delta, bank, folded, count, completes, *arguments)
    # Graphs of other layers take these by name.  A name such as ``getitem_70`` counts the nodes of
    # its layer, so no two layers would be equal and share compiled code; only these are ``detach``.
    answer, log_sum = (each.detach() for each in answers)
    return normed, (answer, log_sum)


def phase_2(
    delta: Tensor,
    bank: Tensor,
    answers: Answers,
    queries: Queries,
    site: SiteWeights,
    slot: BankSlot,
) -> Tensor:
    answer, log_sums = answers
    return _ops.triton_phase_2(delta, bank, answer, log_sums, queries[0], *_site(site, slot))


def add_to_row(delta: Tensor, bank: Tensor, row: int) -> None:
    _ops.triton_add_to_row(delta, bank, row)


def _site(
    site: SiteWeights, slot: BankSlot
) -> tuple[Tensor, bool, Tensor | None, Tensor, float, float]:
    """The last arguments of an operator that runs one site."""
    learned = site.bias, site.norm_weight, site.key_eps, site.norm_eps
    return slot.numbers, slot.fresh, *learned


def _like(delta: Tensor, *_: Any) -> Tensor:
    return delta.new_empty(delta.shape)


def _nothing(*_: Any) -> None:
    return None


def _stacked(queries: Sequence[Tensor], *_: Any) -> Tensor:
    return queries[0].new_empty((len(queries), *queries[0].shape))


def _padded(biases: Sequence[Tensor]) -> Tensor:
    return biases[0].new_empty((len(biases), max(len(bias) for bias in biases)))


def _group(
    delta: Tensor, bank: Tensor, queries: Tensor, count: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = delta.shape
    answers = delta.new_empty((tokens, count - 1, hidden)).transpose(0, 1)
    return _like(delta), answers, queries.new_empty((tokens, count - 1)).t()


_FAKES = {
    "triton_fold": _stacked,
    "triton_pad": _padded,
    "triton_single_pass": _like,
    "triton_phase_1": _group,
    "triton_phase_2": _like,
}
