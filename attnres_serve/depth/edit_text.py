"""Edits as a command line has them, such as ``mask sites=9,final sources="block 2"``."""

import shlex
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from attnres_serve.depth.edits import KINDS, MOST, OLD, Edit, TokenRange
from attnres_serve.errors import SettingError


def read(text: str, name: str = "--edit") -> Edit:
    """The edit that a text gives.

    Args:
        text: as ``mask sites=9,final sources="block 2" tokens=4:9``: a kind, ``scale=0.5`` or
            ``weights=0.5,0.5`` with its value, and the fields of the edit.
        name: what a sentence begins with.

    Raises:
        SettingError: it says something else.
    """
    try:
        parts = [word.partition("=") for word in shlex.split(text)]
        kind, *fields = [("mask" if part[0] == OLD else part[0], part[2]) for part in parts]
    except ValueError:
        raise SettingError(f"{name}: {text!r} cannot be read; expected {_EDIT}.") from None
    values: dict[str, str] = {}
    for field, value in (kind, *fields):
        if field in values or (field in KINDS) != (not values):
            raise SettingError(f"{name}: {field!r} stands where it cannot; expected {_EDIT}.")
        values[field] = value
    try:
        return Edit.model_validate({field: _field(field, value) for field, value in values.items()})
    except ValidationError as error:
        place = str((*error.errors()[0]["loc"], kind[0])[0])
        if place not in _VALUES:
            raise SettingError(f"{name}: {place!r} is no field; expected {_EDIT}.") from None
        problem = f"{name}: {place} is {values[place]!r}; expected {_VALUES[place]}."
        raise SettingError(problem) from None


def each(texts: Sequence[str], name: str = "--edit") -> list[Edit]:
    """The edits that a flag gives; SettingError if there are too many, or as ``read``."""
    if len(texts) > MOST:
        raise SettingError(f"{name} is given {len(texts)} times; expected at most {MOST} times.")
    return [read(text, name) for text in texts]


def write(edit: Edit) -> str:
    """The text of an edit, which ``read`` reads."""
    parts = []
    for field in (edit.kind, "sites", "sources", "tokens"):
        if (value := getattr(edit, field)) is not None:
            parts.append(field if value is True else f"{field}={_written(value)}")
    return shlex.join(parts)


def _written(value: Any) -> str:
    if isinstance(value, TokenRange):
        return f"{value.start}:{'' if value.end is None else value.end}"
    if isinstance(value, list):
        return ",".join(map(_written, value))
    return str(value)


_ALONE = ("mask", "force", "mean")  # kinds without a value
_EDIT = (
    "mask, force, weights=0.5,0.5, mean or scale=2, then sites=9,final, sources='block 2' and "
    "tokens=4:9"
)
# What stands behind a field that pydantic may refuse.
_VALUES = dict.fromkeys(_ALONE, "the word alone, without a value") | {
    "weights": "numbers from 0 to 1 with commas between them, as weights=0.5,0.5",
    "scale": "a number from -1000 to 1000, as scale=2",
    "tokens": "positions from 0 on, as tokens=0,4, or a range of them, as tokens=4:9",
}


def _field(name: str, value: str) -> Any:
    """The value of a field of an edit, as a request has it."""
    parts = value.split(",")
    if name in _ALONE:
        return value or True
    if name == "sites":
        return [int(part) if part.isdecimal() else part for part in parts]
    if name == "tokens" and ":" in value:
        start, _, end = value.partition(":")
        return {key: _number(at) for key, at in (("start", start), ("end", end)) if at}
    if name == "tokens":
        return [_number(part) for part in parts]
    return parts if name in ("sources", "weights") else value


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
