"""``--rename OLD=NEW`` of ``attnres-serve convert``: other names for tensors."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from attnres_serve import sentences
from attnres_serve.checkpoints.renaming.patterns import patterns
from attnres_serve.errors import CheckpointError, SettingError

COMMAND = "attnres-serve convert SRC DST"
OPTION = "--rename"


@dataclass(frozen=True)
class Rename:
    """Another name for tensors.

    Attributes:
        old: a name, or its beginning up to a dot; ``*`` stands for any text without a dot.
        new: what takes its place, with the same text for each ``*``.
    """

    old: str
    new: str

    @classmethod
    def read(cls, text: str) -> "Rename":
        """Read ``OLD=NEW``.

        Raises:
            SettingError: it is not of that form.
        """
        old, equals, new = (part.strip() for part in text.partition("="))
        if not (old and equals and new) or old.count("*") != new.count("*"):
            raise SettingError(
                f"{OPTION} is {text!r}; expected OLD=NEW, two names or their beginnings up to a "
                "dot, with as many * in both: each stands for the same text without a dot."
            )
        return cls(old, new)

    def __str__(self) -> str:
        return f"{self.old}={self.new}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.old).replace(r"\*", r"([^.]+)") + r"(?![^.])")

    def of(self, name: str) -> str | None:
        """The other name of a tensor; None if this is not about it."""
        found = self._pattern.match(name)
        if found is None:
            return None
        pieces = self.new.split("*")
        texts = (*found.groups(), "")
        return "".join(map("".join, zip(pieces, texts, strict=True))) + name[found.end() :]


def new_names(names: Iterable[str], renames: Sequence[Rename]) -> dict[str, str]:
    """The other names that tensors have after some renames, by those that they have now.

    Each rename reads what the ones before it have left.

    Raises:
        CheckpointError: a rename is about no tensor, or two tensors get one name.
    """
    found = {name: name for name in names}
    for rename in renames:
        others = {own: other for own, now in found.items() if (other := rename.of(now)) is not None}
        if not others:
            raise CheckpointError(
                f"{OPTION} {str(rename)!r} is about no tensor of the file: no name is, or begins "
                f"up to a dot with, {rename.old}{_near(rename.old, found.values())}."
            )
        found |= others
    first: dict[str, str] = {}
    for own, now in found.items():
        if now in first:
            raise CheckpointError(
                f"{OPTION} gives two tensors one name: {first[now]} and {own} would both be {now}."
            )
        first[now] = own
    return {own: now for own, now in found.items() if own != now}


def _near(old: str, names: Iterable[str]) -> str:
    """The patterns of names that are likest to one that no name has, as a part of a sentence."""
    parts = old.count(".") + 1
    beginnings = (pattern.text.split(".")[:parts] for pattern in patterns(names))
    known = list(dict.fromkeys(map(".".join, beginnings)))
    near = get_close_matches(old, known, n=2, cutoff=0.5) or known
    return f"; it has {sentences.some(near)}" if near else ""
