"""The predictions of a replay as data: what an answer says that follows each token."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnres_serve.tracing.answer import ReplayResult, short

NONE = -1  # instead of the token after the last one


def best(result: ReplayResult) -> int:
    """The most probable token after the only traced one."""
    assert result.predicted is not None, "the last pipeline stage predicts"
    return int(np.frombuffer(result.predicted[0], np.int64)[0])


def following(ids: Sequence[int], positions: Sequence[int]) -> list[int]:
    """The token after each position of a sequence, or ``NONE``."""
    return [ids[at + 1] if at + 1 < len(ids) else NONE for at in positions]


def predictions(
    packed: Sequence[bytes],
    positions: Sequence[int],
    after: Sequence[int],
    texts_of: Callable[[list[int]], Sequence[str | None]],
) -> list[dict[str, Any]]:
    """A ``Prediction`` for each of the tokens.

    Args:
        packed: the result of ``Predictions.packed``.
        positions: the positions of the tokens.
        after: the token after each, or ``NONE``.
        texts_of: returns the texts of token ids.
    """
    rows = len(positions)
    tops, values, next_logprobs = (
        np.frombuffer(content, dtype)
        for content, dtype in zip(packed, (np.int64, np.float32, np.float32), strict=True)
    )
    count = len(tops) // max(rows, 1)
    ids = tops.tolist()
    distinct = sorted(set(ids))
    texts = dict(zip(distinct, texts_of(distinct), strict=True))
    named = list(zip(ids, short(values), strict=True))
    return [
        {
            "position": position,
            "next": None if token_after == NONE else logprob,
            "top": [
                {"id": token, "text": texts[token], "logprob": value}
                for token, value in named[row * count : (row + 1) * count]
            ],
        }
        for row, (position, token_after, logprob) in enumerate(
            zip(positions, after, short(next_logprobs), strict=True)
        )
    ]
