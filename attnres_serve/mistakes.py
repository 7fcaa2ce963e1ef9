"""One sentence about the first mistake of what a person wrote, by the errors of pydantic.

Pydantic has an error for everything that is wrong, and of a value that may be of several kinds one
for each of them.  Those of the kind that was probably meant are told, the others are left out.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Error = Mapping[str, Any]
Placed = tuple[list[Any], Error]  # with the rest of its place
LONGEST = 40  # characters of a value in a sentence
_UNKNOWN = object()  # a value that is not at hand
# Parts of a place that are names of pydantic's for a kind, where the value is not at hand.
_KIND = re.compile(r".*[\[({A-Z].*|str|int|float|bool|bytes|list|dict|tuple|set|none|.*-.*")
# Words of pydantic's and of a person's, the longer ones first.
_WORDS = (
    ("valid dictionary or object to extract fields from", "object"),
    ("valid dictionary", "object"),
    ("valid integer", "whole number"),
    ("valid boolean", "true or false"),
    ("a true or false", "true or false"),
    ("a object", "an object"),
    ("a valid string", "text"),
    ("iterable", "a list"),
    ("less than or equal to", "at most"),
    ("greater than or equal to", "at least"),
    ("valid ", ""),
    ("True", "true"),
    ("False", "false"),
)


class Mistake(NamedTuple):
    """What is wrong, and where.

    Attributes:
        field: such as ``stop`` or ``edits[0].ban``; empty for the whole.
        reason: what a sentence says of it, without a full stop.
    """

    field: str
    reason: str

    @property
    def sentence(self) -> str:
        """The whole of it."""
        if self.field:
            return f"{self.field}{self.reason}."
        reason = self.reason.removeprefix(": ").removeprefix(" ")
        return f"{reason[:1].upper()}{reason[1:]}."


def first(errors: Sequence[Error], value: Any = _UNKNOWN, below: int = 0) -> Mistake:
    """The first mistake.

    Args:
        errors: pydantic's, of one value.
        value: what was read; it tells fields from pydantic's names of kinds.
        below: how many parts of every place stand before the value's own.
    """
    places = [(list(error["loc"][below:]), error) for error in errors]
    field = ""
    if isinstance(value, dict) and places[0][0][:1] and isinstance(places[0][0][0], int):
        value, field = next(
            ((entries, name) for name, entries in _lists(value) if _are_of(places, entries)),
            (_UNKNOWN, ""),
        )
    found, field = _at(places, value, field)
    return Mistake(field, _reason(found))


def _lists(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every list in a value, and its name; pydantic reads some by themselves, and later."""
    if isinstance(value, list):
        yield name, value
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in steps:
        if isinstance(inner, dict | list):
            yield from _lists(inner, f"{name}{_named(step, name)}")


def _are_of(places: Sequence[Placed], value: Any) -> bool:
    """Whether errors are about a value: each has for its input what stands at its place."""
    for place, error in places:
        inner = value
        for step in place:
            below = _below(inner, step)
            inner = inner if below is _UNKNOWN else below
        if inner != error["input"]:
            return False
    return True


def _at(places: list[Placed], value: Any, field: str) -> tuple[list[Error], str]:
    """The errors of the first place that has some, and the field."""
    place, error = places[0]
    if not place:
        ends = [one for rest, one in places if not rest]
        return [one for one in ends if not _is_type(one)] or ends, field
    step = place[0]
    if _is_step(step, value) or (len(place) == 1 and error["type"] == "missing"):
        inner = [(rest[1:], one) for rest, one in places if rest[:1] == [step]]
        return _at(inner, _below(value, step), f"{field}{_named(step, field)}")
    kinds: dict[Any, list[Placed]] = {}
    for rest, one in places:
        kinds.setdefault(rest[0] if rest else None, []).append((rest[1:], one))
    tagged = [
        [(rest, one) for rest, one in kind if one["type"] == "literal_error"]
        for kind in kinds.values()
    ]
    if all(tagged):  # no kind has that name: it is what is wrong
        return _at([pair for kind in tagged for pair in kind], value, field)
    common = Counter(tuple(rest) for kind in kinds.values() for rest, _ in kind)
    meant = min(kinds.values(), key=lambda kind: _distance(kind, common))
    if all(_is_type(one) and not rest for kind in kinds.values() for rest, one in kind):
        meant = [pair for kind in kinds.values() for pair in kind]
    return _at(meant, value, field)


def _distance(kind: list[Placed], common: Mapping[tuple[Any, ...], int]) -> tuple[int, ...]:
    """How far a value is from a kind, by the kind's errors.

    Args:
        kind: the errors.
        common: how many kinds have an error at each place.
    """
    return (
        any(error["type"] == "literal_error" for _, error in kind),
        all(_is_type(error) and not rest for rest, error in kind),
        -common[tuple(kind[0][0])],
        len(kind),
    )


def _is_type(error: Error) -> bool:
    return str(error["type"]).endswith("_type")


def _is_step(step: Any, value: Any) -> bool:
    """Whether a part of a place leads to a field or an entry."""
    if value is _UNKNOWN:
        return isinstance(step, int) or not _KIND.fullmatch(step)
    if isinstance(value, list):
        return isinstance(step, int)
    return isinstance(value, dict) and step in value


def _below(value: Any, step: Any) -> Any:
    if isinstance(value, dict):
        return value.get(step, _UNKNOWN)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return _UNKNOWN


def _named(step: Any, field: str) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if field else str(step)


def _reason(errors: list[Error]) -> str:
    """What a sentence says behind the field."""
    error, context = errors[0], errors[0].get("ctx") or {}
    kind = error["type"]
    if kind == "missing":
        return " is missing; give it"
    if kind == "extra_forbidden":
        return " is no field that is read; leave it out"
    if kind == "value_error":
        said = error["msg"].removeprefix("Value error, ").partition("\n")[0]
        return f": {re.sub(r' [(]parameter=.*[)]$', '', said).rstrip('.')}"
    if kind == "too_long":
        return f": found {context['actual_length']} entries; expected at most " + str(
            context["max_length"]
        )
    said = dict.fromkeys(_expected(one) for one in errors)
    return f": found {_shown(error.get('input'))}; expected {' or '.join(said)}"


def _expected(error: Error) -> str:
    said = error["msg"].partition("\n")[0].rstrip(".")
    for start in ("Input should be ", "Input should have ", "String should have "):
        said = said.removeprefix(start)
    said = said.partition(", unable to parse")[0].partition(", got a number with")[0]
    said = re.sub(r" or instance of \w+", "", said)
    for theirs, ours in _WORDS:
        said = said.replace(theirs, ours)
    return said


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value[: LONGEST + 1] if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} and more"
