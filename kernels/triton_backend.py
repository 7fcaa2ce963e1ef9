"""The triton backend: the Triton kernels as operators of torch's that write to a bank.

The functions differ from those of the other backends (``backends``) in what they work on: one bank
``[T, slots, d]`` whose rows are the finished blocks and then the partial sum, updated in place.
Queries come folded, ``[d]`` float32: pseudo-query times key norm times logit scale.
"""

import torch
from torch import Tensor

from attnres_serve.kernels.backends import BackendError, SiteWeights

Answers = tuple[Tensor, Tensor]  # [S, T, d] in the activation dtype, log-sum-exps [S, T] float32
_ops = torch.ops.attnres_serve
_library: torch.library.Library | None = None

_SITE = "Tensor query, Tensor norm_weight, Tensor? bias, int row, bool fresh, float key_eps"
SCHEMAS = {
    "triton_single_pass": (f"(Tensor delta, Tensor(a!) bank, {_SITE}, float norm_eps) -> Tensor"),
    "triton_complete_row": "(Tensor delta, Tensor(a!) bank, int row, bool fresh) -> ()",
    "triton_norm_answer": (
        "(Tensor answers, Tensor norm_weight, int position, float norm_eps) -> Tensor"
    ),
    "triton_inter_block": (
        "(Tensor bank, Tensor queries, int count, float key_eps) -> (Tensor, Tensor)"
    ),
    "triton_merge": (
        "(Tensor delta, Tensor(a!) bank, Tensor answers, Tensor log_sums, int position, "
        f"{_SITE}, float norm_eps) -> Tensor"
    ),
}


def prepare() -> None:
    """Register the operators.

    Raises:
        BackendError: there is no Triton, or neither a CUDA device nor Triton's interpreter.
    """
    global _library
    if _library is not None:
        return
    try:
        from attnres_serve.kernels import triton_common, triton_single_pass, triton_two_phase
    except ImportError as error:
        raise BackendError(
            f"the triton backend needs Triton ({error}); choose the torch backend."
        ) from error
    if not (torch.cuda.is_available() or triton_common.INTERPRETED):
        raise BackendError("the triton backend needs a CUDA device; choose the torch backend.")

    def single_pass(delta, bank, query, norm_weight, bias, row, fresh, key_eps, norm_eps):
        return triton_single_pass.single_pass(
            delta,
            bank,
            query,
            norm_weight,
            row=row,
            fresh=fresh,
            key_eps=key_eps,
            norm_eps=norm_eps,
            bias=bias,
        )

    def complete_row(delta, bank, row, fresh):
        bank[:, row] = delta if fresh else bank[:, row] + delta

    def norm_answer(answers, norm_weight, position, norm_eps):
        return triton_two_phase.norm_answer(
            answers, norm_weight, position=position, norm_eps=norm_eps
        )

    def inter_block(bank, queries, count, key_eps):
        return triton_two_phase.inter_block(bank, queries, count=count, key_eps=key_eps)

    def merge(
        delta,
        bank,
        answers,
        log_sums,
        position,
        query,
        norm_weight,
        bias,
        row,
        fresh,
        key_eps,
        norm_eps,
    ):
        return triton_two_phase.merge(
            delta,
            bank,
            answers,
            log_sums,
            query,
            norm_weight,
            row=row,
            position=position,
            fresh=fresh,
            key_eps=key_eps,
            norm_eps=norm_eps,
            bias=bias,
        )

    _library = torch.library.Library("attnres_serve", "FRAGMENT")
    key = "CPU" if triton_common.INTERPRETED else "CUDA"
    functions = (single_pass, complete_row, norm_answer, inter_block, merge)
    for name, function in zip(SCHEMAS, functions, strict=True):
        _library.define(name + SCHEMAS[name])
        _library.impl(name, function, key)
    for name, fake in zip(SCHEMAS, (_like, _nothing, _one, _answers, _like), strict=True):
        torch.library.register_fake(f"attnres_serve::{name}", fake, lib=_library)


def single_pass(
    delta: Tensor, bank: Tensor, query: Tensor, site: SiteWeights, row: int, fresh: bool
) -> Tensor:
    """Add ``delta`` to bank row ``row`` (or begin it), attend to all rows up to it, norm the mix.

    Returns:
        The normed mix ``[T, d]``.
    """
    own = query, site.norm_weight, site.bias, row, fresh, site.key_eps, site.norm_eps
    return _ops.triton_single_pass(delta, bank, *own)


def complete_row(delta: Tensor, bank: Tensor, row: int, fresh: bool) -> None:
    """Add ``delta`` to bank row ``row``, or begin it; nothing is attended to."""
    _ops.triton_complete_row(delta, bank, row, fresh)


def norm_answer(answers: Answers, position: int, site: SiteWeights) -> Tensor:
    """The result ``[T, d]`` of a site whose sources are finished blocks only."""
    return _ops.triton_norm_answer(answers[0], site.norm_weight, position, site.norm_eps)


def inter_block(bank: Tensor, queries: Tensor, count: int, key_eps: float) -> Answers:
    """Phase 1: sites with the queries ``[S, d]`` attend to the first ``count`` rows."""
    return _ops.triton_inter_block(bank, queries, count, key_eps)


def merge(
    delta: Tensor,
    bank: Tensor,
    answers: Answers,
    position: int,
    query: Tensor,
    site: SiteWeights,
    row: int,
    fresh: bool,
) -> Tensor:
    """Phase 2: as ``single_pass``, with the answer at ``position`` for the rows before."""
    own = query, site.norm_weight, site.bias, row, fresh, site.key_eps, site.norm_eps
    return _ops.triton_merge(delta, bank, *answers, position, *own)


def _like(delta: Tensor, *_) -> Tensor:
    return delta.new_empty(delta.shape)


def _nothing(*_) -> None:
    return None


def _one(answers: Tensor, *_) -> Tensor:
    return answers.new_empty(answers.shape[1:])


def _answers(bank: Tensor, queries: Tensor, count: int, key_eps: float) -> Answers:
    tokens, _, hidden = bank.shape
    sites = queries.shape[0]
    answers = bank.new_empty((tokens, sites, hidden)).transpose(0, 1)
    return answers, queries.new_empty((tokens, sites)).t()
