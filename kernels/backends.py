"""Backends: who computes a site.  Algorithm and backend are separate choices.

The backends torch and cpp are modules with the same four functions, tensors in and tensors out
(triton, which writes to a bank in place, has its own, see ``triton_backend``):

``single_pass(blocks, partial, delta, weights) -> normed, updated``
    Add the sublayer's output to the partial sum, attend to all sources at once, norm the mix.
``inter_block(blocks, sites) -> answers``
    Phase 1 of two-phase: the sites attend to the finished blocks in one pass over them.
``norm_answer(answers, position, weights, like) -> normed``
    A site whose sources are finished blocks only: its answer of phase 1, normed.
``merge(answers, position, partial, delta, weights) -> normed, updated``
    Phase 2: add, merge the partial sum into the answer by online softmax, norm the mix.

Shapes: ``blocks`` are ``n`` tensors ``[T, d]`` of one dtype, the embedding first; ``partial`` is
the running partial sum ``[T, d]``, None where a block has just begun; ``delta`` is the sublayer's
output ``[T, d]``; ``normed`` and ``updated`` (the new partial sum, rounded to the activation dtype
before it is a source) are ``[T, d]`` in that dtype.  ``answers`` belongs to the backend;
``position`` counts the sites of its phase 1.  No function writes to its arguments.
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
        logit_scale: factor of the logits.  Only the product of these three matters; backends
            multiply in every pass, so that weights updated in place take effect.
        key_eps: epsilon of the key norm.
        bias: ``[1]`` float32, added to the logit of the last source; None for none.  Phase 1 does
            not know it.
        norm_weight: weight ``[d]`` of the RMSNorm behind the mix.
        norm_eps: its epsilon.
    """

    query: "Tensor"
    key_norm: "Tensor"
    logit_scale: float
    key_eps: float
    bias: "Tensor | None"
    norm_weight: "Tensor"
    norm_eps: float


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
