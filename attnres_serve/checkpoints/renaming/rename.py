"""``--rename OLD=NEW`` of ``attnres-serve convert``: other names for tensors."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from attnres_serve import sentences
from attnres_serve.checkpoints.renaming.patterns import patterns
from attnres_serve.errors import CheckpointError, SettingError

CONVERT_COMMAND = "attnres-serve convert SRC DST"
RENAME_OPTION = "--rename"


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
                f"{RENAME_OPTION} is {text!r}; expected OLD=NEW, two names or their beginnings up "
                "to a dot, with as many * in both: each stands for the same text without a dot."
            )
        return cls(old, new)

    def __str__(self) -> str:
        return f"{self.old}={self.new}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.old).replace(r"\*", r"([^.]+)") + r"(?![^.])")

    def new_name(self, name: str) -> str | None:
        """The new name of a tensor; None if this rename does not match its name."""
        match = self._pattern.match(name)
        if match is None:
            return None
        texts_between_stars = self.new.split("*")
        texts_of_stars = (*match.groups(), "")
        beginning = map("".join, zip(texts_between_stars, texts_of_stars, strict=True))
        return "".join(beginning) + name[match.end() :]


def new_names(names: Iterable[str], renames: Sequence[Rename]) -> dict[str, str]:
    """The new name of each tensor whose name the renames change, by its present name.

    Each rename applies to the names that the renames before it gave.

    Raises:
        CheckpointError: a rename matches no tensor, or two tensors get one name.
    """
    name_so_far = {name: name for name in names}
    for rename in renames:
        changed = {
            stored_name: new_name
            for stored_name, name in name_so_far.items()
            if (new_name := rename.new_name(name)) is not None
        }
        if not changed:
            similar_names = _similar_names(rename.old, name_so_far.values())
            raise CheckpointError(
                f"{RENAME_OPTION} {str(rename)!r} is about no tensor of the file: no name is, or "
                f"begins up to a dot with, {rename.old}{similar_names}."
            )
        name_so_far |= changed
    stored_name_of: dict[str, str] = {}
    for stored_name, final_name in name_so_far.items():
        if final_name in stored_name_of:
            raise CheckpointError(
                f"{RENAME_OPTION} gives two tensors one name: {stored_name_of[final_name]} and "
                f"{stored_name} would both be {final_name}."
            )
        stored_name_of[final_name] = stored_name
    return {stored_name: name for stored_name, name in name_so_far.items() if stored_name != name}


def _similar_names(old: str, names: Iterable[str]) -> str:
    """The end of a sentence that lists the names most similar to one that matches none of them.

    Names that differ only in numbers are listed as one pattern.
    """
    part_count = old.count(".") + 1
    beginnings = (pattern.text.split(".")[:part_count] for pattern in patterns(names))
    candidates = list(dict.fromkeys(map(".".join, beginnings)))
    similar = get_close_matches(old, candidates, n=2, cutoff=0.5) or candidates
    return f"; it has {sentences.some(similar)}" if similar else ""
