"""Patterns of tensor names that differ only in numbers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from attnres_serve import sentences

_PART = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots
_STAR = re.compile(r"(?<![^.])\*(?![^.])")
_ANY = re.compile(r"\d+")
_LETTERS = "NMK"  # for numbers in a sentence


@dataclass(frozen=True)
class Pattern:
    """Names with ``*`` for numbers.

    Attributes:
        stem: a name with a ``*`` for each number, even for one that all names share.
        members: the names by their numbers.
    """

    stem: str
    members: Mapping[tuple[str, ...], str]

    @cached_property
    def _varying(self) -> list[int]:
        numbers = list(self.members)
        return [i for i in range(self.stem.count("*")) if len({one[i] for one in numbers}) > 1]

    @cached_property
    def layer(self) -> str | None:
        """The first number between dots if all names share it; None otherwise."""
        if 0 in self._varying or not _STAR.search(self.stem):
            return None
        return next(iter(self.members))[0]

    @cached_property
    def text(self) -> str:
        """The pattern, with ``*`` only for numbers that vary."""
        first, pieces = next(iter(self.members)), self.stem.split("*")
        stars = ("*" if i in self._varying else number for i, number in enumerate(first))
        return pieces[0] + "".join(f"{s}{p}" for s, p in zip(stars, pieces[1:], strict=True))

    @cached_property
    def by_numbers(self) -> dict[tuple[str, ...], str]:
        """The names by their varying numbers."""
        return {tuple(key[i] for i in self._varying): name for key, name in self.members.items()}

    def split(self) -> list["Pattern"]:
        """The same names, in one pattern for each value of the last varying number."""
        by_last: dict[str, dict[tuple[str, ...], str]] = {}
        for key, name in self.members.items():
            by_last.setdefault(key[self._varying[-1]], {})[key] = name
        return [Pattern(self.stem, members) for members in by_last.values()]

    def __str__(self) -> str:
        """The pattern in a sentence, and its layers."""
        text = self.text
        for letter in _LETTERS[: text.count("*")]:
            text = text.replace("*", letter, 1)
        if not self._varying:
            return text
        numbers = sorted({int(key[0]) for key in self.by_numbers})
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{text} (N from {numbers[0]} to {numbers[-1]})"
        return f"{text} (N is {sentences.some(numbers)})"


def patterns(names: Iterable[str]) -> list[Pattern]:
    """The patterns of names, in order of first occurrence."""
    by_stem: dict[str, dict[tuple[str, ...], str]] = {}
    for name in names:
        number, count = (_PART, 0) if _PART.search(name) else (_ANY, 1)
        stem = number.sub("*", name, count)
        numbers = tuple(number.findall(name)[: count or None])
        by_stem.setdefault(stem, {})[numbers] = name
    return [Pattern(stem, members) for stem, members in by_stem.items()]
