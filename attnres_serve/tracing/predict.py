"""What a replay predicts: the logprobs of the tokens that may follow."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_serve.compat import decoder
from attnres_serve.tracing.listen import TOKENS_AT_ONCE

LEAST = -9999.0  # instead of the logarithm of zero, as in vLLM's routes


class Predictions:
    """Listens at the end of a replay's last pipeline stage.

    Args:
        positions: ascending, of the tokens whose successors are predicted.
        following: the token that follows each of them in the sequence, or ``answer.NONE``.
        top: how many of the most probable tokens are kept for each.
    """

    def __init__(self, positions: Sequence[int], following: Sequence[int], top: int) -> None:
        self.positions, self.following, self.top = positions, following, top
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, model, begin: int, hidden: Tensor) -> None:
        """Take what the decoder gave for a chunk.

        Args:
            model: the whole model.
            begin: position of the chunk's first token.
            hidden: ``[T, d]``, behind the last norm.
        """
        first, end = (bisect_left(self.positions, at) for at in (begin, begin + len(hidden)))
        for at in range(first, end, TOKENS_AT_ONCE):
            part = slice(at, min(at + TOKENS_AT_ONCE, end))
            rows = torch.tensor(self.positions[part], device=hidden.device) - begin
            logits = decoder.logits(model, hidden[rows])
            if logits is not None:
                self._parts.append(self._of(logits.float(), self.following[part]))

    def _of(self, logits: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        total = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(self.top, dim=-1)
        next_ids = torch.tensor(following, device=logits.device).clamp(min=0)[:, None]
        own = (logits.gather(-1, next_ids) - total)[:, 0]
        values = ((best.values - total), own)
        return best.indices.cpu(), *(value.clamp(min=LEAST).cpu() for value in values)

    def packed(self) -> list[bytes] | None:
        """The predictions as bytes; None on a worker that has no logits.

        Returns:
            The top tokens ``[T, top]`` int64, their logprobs ``[T, top]`` and those of the tokens
            that follow ``[T]``, both float32.

        Raises:
            ValueError: the model gave no numbers.
        """
        if not self._parts:
            return None
        top, values, own = (torch.cat(part) for part in zip(*self._parts, strict=True))
        if bool(own.isnan().any()):
            raise ValueError("the logits are not numbers")
        return [part.contiguous().numpy().tobytes() for part in (top, values, own)]
