"""A text as pieces of tokens that can be traced one by one, read as they are needed."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from attnres_serve.errors import SettingError
from attnres_serve.inspect.given import STDIN
from attnres_serve.inspect.token_classes import Classes

CHARACTERS = 2**20  # that are tokenized at once
LONGEST = 4096  # tokens of a piece, as of a server's trace: attention grows with their square


def parts_of_file(flag: str, name: str) -> Iterator[str]:
    """The text of a file, in parts that end at line breaks.

    A part has ``CHARACTERS`` and the rest of their last line, of which at most as many again.

    Args:
        flag: that names it.
        name: of the file; ``-`` is stdin.

    Raises:
        SettingError: it cannot be read, is empty or not in UTF-8.
    """
    is_empty, is_stdin = True, name == STDIN
    place = sys.stdin.fileno() if is_stdin else name
    try:
        # Line breaks stay as they are.
        with open(place, encoding="utf-8", newline="", closefd=not is_stdin) as file:
            while part := file.read(CHARACTERS):
                is_empty = False
                yield part + file.readline(CHARACTERS)
    except OSError as error:
        raise SettingError(f"{flag}: {name} cannot be read ({error}).") from None
    except UnicodeDecodeError:
        raise SettingError(f"{flag}: {name} is not in UTF-8; convert it first.") from None
    if is_empty:
        raise SettingError(f"{flag}: {name} is empty; give some text.")


class Piece(NamedTuple):
    """A sequence of its own.

    Attributes:
        ids: its tokens.
        classes: their places in ``CLASSES``.
    """

    ids: list[int]
    classes: list[int]


def pieces(tokenizer: Any, parts: Iterable[str], longest: int) -> Iterator[Piece]:
    """The pieces of a text.  Each has the special tokens that the tokenizer puts around one.

    Args:
        tokenizer: of transformers'.
        parts: of the text, each tokenized by itself.
        longest: tokens of a piece.

    Raises:
        SettingError: there is no room for a token beside the special ones.
    """
    classes = Classes(tokenizer)
    before, after = _around(tokenizer)
    around = classes.of(before), classes.of(after)
    room = longest - len(before) - len(after)
    if room < 1:
        raise SettingError(
            f"a piece of {longest} tokens has no room beside the tokenizer's special ones; give a "
            "longer --max-model-len."
        )
    for part in parts:
        ids = tokenizer.encode(part, add_special_tokens=False, verbose=False)
        found = classes.of(ids)  # of the whole part, as a piece may begin within a word
        for begin in range(0, len(ids), room):
            own = slice(begin, begin + room)
            yield Piece([*before, *ids[own], *after], [*around[0], *found[own], *around[1]])


def _around(tokenizer: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The special tokens before and behind a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return (), ()
