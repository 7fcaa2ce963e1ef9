"""The predictions of a replay: logprobs of next tokens."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_serve.compat import logits
from attnres_serve.tracing.listen import TOKENS_AT_ONCE

LEAST = -9999.0  # instead of the logarithm of zero, as in vLLM's routes


class Predictions:
    """Predictions from the output of a replay's last pipeline stage.

    Args:
        positions: ascending positions of the tokens after which to predict.
        following: the token after each of them in the sequence, or ``predicted.NONE``.
        top: number of the most probable tokens to keep for each.
    """

    def __init__(self, positions: Sequence[int], following: Sequence[int], top: int) -> None:
        self.positions, self.following, self.top = positions, following, top
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, model, begin: int, hidden: Tensor) -> None:
        """Take the decoder's output for a chunk.

        Args:
            model: the whole model.
            begin: position of the chunk's first token.
            hidden: ``[T, d]``, after the last norm.
        """
        first, end = (bisect_left(self.positions, at) for at in (begin, begin + len(hidden)))
        for at in range(first, end, TOKENS_AT_ONCE):
            part = slice(at, min(at + TOKENS_AT_ONCE, end))
            rows = torch.tensor(self.positions[part], device=hidden.device) - begin
            rows_of_logits = logits.logits(model, hidden[rows])
            if rows_of_logits is not None:
                self._parts.append(self._of(rows_of_logits.float(), self.following[part]))

    def _of(self, logits: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        total = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(self.top, dim=-1)
        next_ids = torch.tensor(following, device=logits.device).clamp(min=0)[:, None]
        next_logprobs = (logits.gather(-1, next_ids) - total)[:, 0]
        values = ((best.values - total), next_logprobs)
        return best.indices.cpu(), *(value.clamp(min=LEAST).cpu() for value in values)

    def packed(self) -> list[bytes] | None:
        """The predictions as bytes; None on a worker without logits.

        Returns:
            The top tokens ``[T, top]`` int64, their logprobs ``[T, top]`` float32, and the logprobs
            of the next tokens ``[T]`` float32.

        Raises:
            ValueError: the logits are NaN.
        """
        if not self._parts:
            return None
        top, values, next_logprobs = (torch.cat(part) for part in zip(*self._parts, strict=True))
        if bool(next_logprobs.isnan().any()):
            raise ValueError("the logits are not numbers")
        return [part.contiguous().numpy().tobytes() for part in (top, values, next_logprobs)]
