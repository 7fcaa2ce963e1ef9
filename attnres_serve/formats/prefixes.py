"""Prefixes of tensor names in a format and in the house format, translated both ways."""

import re
from collections.abc import Iterable

Pair = tuple[str, str]
_Table = list[tuple[re.Pattern[str], str]]


class Prefixes:
    """The prefixes that differ between a format and the house format."""

    def __init__(self, *pairs: Pair) -> None:
        """Compile the prefixes.

        Args:
            pairs: the prefix in the format, and in the house format; ``#`` stands for the number
                of a layer.  The first match counts.
        """
        self._to_house = _compiled(pairs)
        self._to_stored = _compiled((house, ours) for ours, house in pairs)

    def rename(self, name: str) -> str:
        """The house name of a tensor of the format."""
        return _with_other_beginning(name, self._to_house)

    def stored_name(self, name: str) -> str:
        """The format's name of a tensor, by its house name."""
        return _with_other_beginning(name, self._to_stored)


def _compiled(pairs: Iterable[Pair]) -> _Table:
    return [
        (re.compile(re.escape(old).replace(r"\#", r"(\d+)")), new.replace("#", r"\1"))
        for old, new in pairs
    ]


def _with_other_beginning(name: str, table: _Table) -> str:
    for pattern, replacement in table:
        if match := pattern.match(name):
            return match.expand(replacement) + name[match.end() :]
    return name
