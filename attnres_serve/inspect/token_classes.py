"""Classes of tokens, decided from a token's text and the end of the text before it.

| class | rule, the first that holds |
|---|---|
| special | the tokenizer calls it special |
| whitespace | its text is white space alone, or empty |
| word continuation | it has a letter, and the first one goes on with a word |
| word start | it has another letter |
| number | it has a digit |
| punctuation | any other |

A letter goes on with a word if a letter, a digit or a mark is right before it, in this token or in
the one before, or an apostrophe behind one of those.  Letters, digits and marks are those of
Unicode; bytes that are no whole character, which decode to U+FFFD, count as letters.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

from attnres_serve.compat.token_texts import TokenTexts

SPECIAL = "special"
CLASSES = (SPECIAL, "whitespace", "word start", "word continuation", "number", "punctuation")
_SPECIAL, _WHITESPACE, _START, _CONTINUATION, _NUMBER, _PUNCTUATION = range(len(CLASSES))
_APOSTROPHES = "'\u2019"
_PART = "\ufffd"  # of a character


class Classes:
    """The classes of a tokenizer's tokens.

    Args:
        tokenizer: of transformers'.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._special = frozenset(tokenizer.all_special_ids)
        self._texts = TokenTexts(tokenizer)

    def of(self, ids: Sequence[int]) -> list[int]:
        """The places in ``CLASSES`` of the tokens of a sequence."""
        found, before = [], ""
        for token in ids:
            text = self._texts.text(token)
            if token in self._special:
                found.append(_SPECIAL)
                before = ""
            else:
                found.append(class_of(text, before))
                before = (before + text)[-2:]
        return found


def class_of(text: str, before: str) -> int:
    """The place in ``CLASSES`` of a token that is not special.

    Args:
        text: its own.
        before: at least the last two characters before it, or all.
    """
    if not text.strip():
        return _WHITESPACE
    kinds = [_kind(sign) for sign in text]
    if "L" in kinds:
        return _CONTINUATION if _in_word(before + text[: kinds.index("L")]) else _START
    return _NUMBER if "N" in kinds else _PUNCTUATION


def _in_word(before: str) -> bool:
    """Whether a letter behind this text goes on with a word."""
    if before and before[-1] in _APOSTROPHES:
        before = before[:-1]
    return bool(before) and _kind(before[-1]) in "LNM"


def _kind(sign: str) -> str:
    """The first letter of a character's category in Unicode."""
    return "L" if sign == _PART else unicodedata.category(sign)[0]
