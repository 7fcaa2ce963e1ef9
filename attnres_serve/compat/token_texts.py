"""Texts of single tokens."""

from collections.abc import Sequence
from typing import Any


class TokenTexts:
    """Gives the text of a token as it is behind another one.

    Alone, some tokenizers decode a token without the space before it (Metaspace of SentencePiece).

    Args:
        tokenizer: of transformers', or one of vLLM's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchored = self._decode(self._anchor)

    def of(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens, each by itself."""
        return [self.text(token) for token in ids]

    def text(self, token: int) -> str:
        """The text of one token."""
        if token not in self._texts:
            both = self._decode([*self._anchor, token])
            is_behind = both.startswith(self._anchored)
            self._texts[token] = both[len(self._anchored) :] if is_behind else self._decode([token])
        return self._texts[token]
