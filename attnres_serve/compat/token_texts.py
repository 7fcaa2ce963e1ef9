"""Texts of single tokens."""

from collections.abc import Sequence
from typing import Any


def texts_behind_another(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token after another one.

    For a single token, some tokenizers drop the space before it (Metaspace of SentencePiece).

    Args:
        tokenizer: of transformers or vLLM.
        ids: of the tokens.
    """
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    anchored = tokenizer.decode(anchor)
    texts: dict[int, str] = {}
    for token in {*ids}:
        both = tokenizer.decode([*anchor, token])
        is_behind = both.startswith(anchored)
        texts[token] = both[len(anchored) :] if is_behind else tokenizer.decode([token])
    return [texts[token] for token in ids]
