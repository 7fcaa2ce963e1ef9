"""Magnitudes of a model with standard residuals: what its norms receive, and the stream they read.

A norm of vLLM's decoders adds what it receives, a sublayer's output, to the residual stream, and
norms the sum.  So the stream takes the place of a site's mix.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnres_serve.compat import decoder, replay
from attnres_serve.inspect.listen import rms
from attnres_serve.inspect.record import TraceError

CONVENTION = (
    "does not add what it receives to the residual of the norm before it, so the stream of this "
    "model cannot be measured exactly; compare with a model of another family."
)


class Listener:
    """Hooks of the norms of a pipeline stage.

    Args:
        norms: those of the stage by their numbers.

    Attributes:
        received: by the norm's number, parts of ``[T]`` float32: RMS of what the sublayer before it
            gave, at norm 0 of the embedding.
        stream: the same of the residual stream, that included.
        ran: the numbers of the norms that ran, in order.
        wrong: the number of the first norm that does not add to the stream of the one before it;
            None for none.
    """

    def __init__(self, norms: Mapping[int, Any]) -> None:
        self.received: dict[int, list[Tensor]] = {}
        self.stream: dict[int, list[Tensor]] = {}
        self.ran: list[int] = []
        self.wrong = next(
            (at for at, norm in norms.items() if not decoder.is_plain_norm(norm)), None
        )
        self._first = min(norms)
        self._last: Tensor | None = None  # the stream behind the norm that ran last

    def before(self, number: int, norm: Any, arguments: tuple) -> None:
        """Measure what a norm receives, before it may write over it."""
        hidden, *residual = arguments
        if self.wrong is None and not self._is_usual(number, residual):
            self.wrong = number
        self.ran.append(number)
        self.received.setdefault(number, []).append(rms(hidden).cpu())

    def after(self, number: int, norm: Any, arguments: tuple, output: Any) -> None:
        """Measure the sum that a norm hands on; the embedding at norm 0, which has no other."""
        stream = arguments[0] if number == 0 else output[1]
        self._last = stream.clone()  # the model may write over it
        self.stream.setdefault(number, []).append(rms(stream).cpu())

    def _is_usual(self, number: int, residual: list[Tensor]) -> bool:
        """Whether a norm is given the stream of the one before it, as far as that is known here."""
        if number == 0:
            return not residual
        if number == self._first:  # another stage has the one before
            return len(residual) == 1
        return len(residual) == 1 and self._last is not None and torch.equal(*residual, self._last)


def measure(worker, ids: Sequence[int], norms: Sequence[str]) -> dict[int, tuple[Tensor, Tensor]]:
    """Replay a sequence; every worker of the engine does so at once.

    Args:
        worker: vLLM's, with a model of standard residuals.
        ids: the sequence.
        norms: paths of the norms below the decoder, one for each sublayer and the last one.

    Returns:
        For every norm of this worker's pipeline stage, by its number, ``[T]`` float32 each: the RMS
        of what it receives, and of the stream that it reads, as the model rounds it.

    Raises:
        TraceError: the norms are called by another convention.
    """
    model = decoder.inner_model(worker)
    here = decoder.norms_here(model, norms)
    listener = Listener(here)
    with ExitStack() as hooks:
        for number, norm in here.items():
            before, after = partial(listener.before, number), partial(listener.after, number)
            hooks.callback(norm.register_forward_pre_hook(before).remove)
            hooks.callback(norm.register_forward_hook(after).remove)
        passes = replay.replay(worker, ids)
    if listener.wrong is not None:
        raise TraceError(f"{norms[listener.wrong]} of vLLM's {type(model).__name__} {CONVENTION}")
    if listener.ran != list(here) * passes:
        raise TraceError(f"a norm of vLLM's {type(model).__name__} {CONVENTION}")
    return {
        number: (torch.cat(listener.received[number]), torch.cat(listener.stream[number]))
        for number in here
    }
