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
        old: a name, or its prefix up to a dot; ``*`` matches any text without a dot.
        new: the replacement, with the same text for each ``*``.
    """

    old: str
    new: str

    @classmethod
    def read(cls, text: str) -> "Rename":
        """Read ``OLD=NEW``.

        Raises:
            SettingError: the text has another form.
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
        """The new name of a tensor; None if this rename does not match."""
        match = self._pattern.match(name)
        if match is None:
            return None
        pieces = self.new.split("*")
        texts = (*match.groups(), "")
        return "".join(map("".join, zip(pieces, texts, strict=True))) + name[match.end() :]


def new_names(names: Iterable[str], renames: Sequence[Rename]) -> dict[str, str]:
    """The new names of tensors after some renames, by their names now.

    Each rename applies to the results of those before it.

    Raises:
        CheckpointError: a rename matches no tensor, or two tensors get one name.
    """
    current = {name: name for name in names}
    for rename in renames:
        others = {
            stored_name: other
            for stored_name, now in current.items()
            if (other := rename.of(now)) is not None
        }
        if not others:
            raise CheckpointError(
                f"{OPTION} {str(rename)!r} is about no tensor of the file: no name is, or begins "
                f"up to a dot with, {rename.old}{_near(rename.old, current.values())}."
            )
        current |= others
    first: dict[str, str] = {}
    for stored_name, now in current.items():
        if now in first:
            raise CheckpointError(
                f"{OPTION} gives two tensors one name: {first[now]} and {stored_name} would both "
                f"be {now}."
            )
        first[now] = stored_name
    return {stored_name: now for stored_name, now in current.items() if stored_name != now}


def _near(old: str, names: Iterable[str]) -> str:
    """The patterns of names most similar to an unknown one, as a part of a sentence."""
    parts = old.count(".") + 1
    beginnings = (pattern.text.split(".")[:parts] for pattern in patterns(names))
    known = list(dict.fromkeys(map(".".join, beginnings)))
    near = get_close_matches(old, known, n=2, cutoff=0.5) or known
    return f"; it has {sentences.some(near)}" if near else ""
