"""One sentence about the first mistake in a request or a file, from pydantic's errors.

Pydantic reports every mistake, and for a value that may be of several kinds, one for each of them.
Only the errors of the kind that was probably meant are used.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Error = Mapping[str, Any]
Place = tuple[Any, ...]
LONGEST = 40  # characters of a value in a sentence
_UNKNOWN = object()  # a value that is not available
# Parts of a place that are pydantic's names of kinds, if the value is not available.
_KIND = re.compile(r".*[\[({A-Z].*|str|int|float|bool|bytes|list|dict|tuple|set|none|.*-.*")
# The expected value for each type of pydantic's errors.  ``{last}`` is the last word of its
# message, and other names are from its context.
_EXPECTED = {
    "bool_parsing bool_type": "true or false",
    "bytes_type string_type string_unicode": "text",
    "dataclass_type dict_type mapping_type model_attributes_type model_type": "an object",
    "enum literal_error": "{expected}",
    "float_parsing float_type": "a number",
    "frozen_set_type iterable_type list_type set_type tuple_type": "a list",
    "greater_than": "more than {last}",
    "greater_than_equal": "at least {last}",
    "int_from_float int_parsing int_type": "a whole number",
    "int_parsing_size": "a whole number of at most 19 digits",
    "invalid_key": "text for a name",
    "less_than": "less than {last}",
    "less_than_equal": "at most {last}",
    "string_pattern_mismatch": "text of the pattern {pattern}",
}
_BY_TYPE = {kind: template for kinds, template in _EXPECTED.items() for kind in kinds.split()}
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNREAD = ("extra_forbidden", "unexpected_keyword_argument")
_BY_VALIDATORS = ("value_error", "assertion_error")  # by a validator, in its own words


class Mistake(NamedTuple):
    """A mistake and its place.

    Attributes:
        field: such as ``stop`` or ``edits[0].mask``; empty for the whole value.
        reason: the rest of the sentence, without a full stop.
    """

    field: str
    reason: str

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        if self.field:
            return f"{self.field}{self.reason}."
        reason = self.reason.removeprefix(": ").removeprefix(" ")
        return f"{reason[:1].upper()}{reason[1:]}."


def first(errors: Sequence[Error], value: Any = _UNKNOWN, below: int = 0) -> Mistake:
    """The first mistake.

    Args:
        errors: pydantic's, about one value.
        value: the value, to distinguish fields from pydantic's names of kinds.
        below: the number of leading parts of every place that do not belong to the value.
    """
    errors = [_of_tag(error) for error in errors]
    field, places = "", [list(error["loc"][below:]) for error in errors]
    if isinstance(value, dict) and places[0][:1] and isinstance(places[0][0], int):
        pairs = [*zip(places, errors, strict=True)]
        lists = ((entries, name) for name, entries in _lists(value) if _are_of(pairs, entries))
        value, field = next(lists, (_UNKNOWN, ""))
    kinds: dict[tuple[Any, ...], list[tuple[Place, Error]]] = {}
    for place, error in zip(places, errors, strict=True):
        steps, kind = _split(place, error, value)
        if place[:1] == places[0][:1]:
            kinds.setdefault(kind, []).append((steps, error))
    untagged = [kind for kind in kinds.values() if not any(_is_tag(error) for _, error in kind)]
    meant = [pair for kind in untagged or kinds.values() for pair in kind]
    if not untagged:  # no kind has that name: the name is the mistake
        meant = [(steps, error) for steps, error in meant if _is_tag(error)]
    # The kind that was meant is the one with the longest place.
    furthest = max((steps for steps, _ in meant), key=len)
    ends = [error for steps, error in meant if steps == furthest]
    for step in furthest:
        field += _named(step, field)
    return Mistake(field, _reason([one for one in ends if not _is_type(one)] or ends))


def messages(errors: Sequence[Error]) -> str:
    """The messages of all errors of vLLM's configuration, as its validators wrote them."""
    return "; ".join(str(error["msg"]) for error in errors).removeprefix("Value error, ")


def _split(place: list[Any], error: Error, value: Any) -> tuple[Place, Place]:
    """The steps of a place to fields and entries, and the names of kinds among them."""
    steps, kind = [], []
    for number, part in enumerate(place, 1):
        is_missing = error["type"] in _MISSING and number == len(place)
        if is_missing or _is_step(part, value):
            steps.append(part)
            value = _below(value, part)
        else:
            kind.append(part)
    return tuple(steps), tuple(kind)


def _lists(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every list in a value, and its name; pydantic validates some separately."""
    if isinstance(value, list):
        yield name, value
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in steps:
        if isinstance(inner, dict | list):
            yield from _lists(inner, f"{name}{_named(step, name)}")


def _are_of(pairs: Sequence[tuple[list[Any], Error]], value: Any) -> bool:
    """Whether errors are about a value: each error's input is the value at its place."""
    for place, error in pairs:
        inner = value
        for step in place:
            below = _below(inner, step)
            inner = inner if below is _UNKNOWN else below
        if inner != error["input"]:
            return False
    return True


def _of_tag(error: Error) -> Error:
    """An error about the field that names a kind, instead of its parent."""
    context, kind = error.get("ctx") or {}, str(error["type"])
    name = str(context.get("discriminator", "")).strip("'")
    if not name.isidentifier():  # a function chooses the kind
        return error
    error = {**error, "loc": (*error["loc"], name)}
    if kind == "union_tag_not_found":
        return error | {"type": "missing"}
    expected = {"expected": context["expected_tags"]}
    return error | {"type": "literal_error", "input": context["tag"], "ctx": expected}


def _is_tag(error: Error) -> bool:
    return bool(error["type"] == "literal_error")


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
    """The sentence after the field."""
    error, context = errors[0], errors[0].get("ctx") or {}
    kind = error["type"]
    if kind in _MISSING:
        return " is missing; give it"
    if kind in _UNREAD:
        return " is no field that is read; leave it out"
    if kind in _BY_VALIDATORS:
        expected = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f": {expected.partition(chr(10))[0].rstrip('.')}"
    if kind in ("too_long", "too_short"):
        most = kind == "too_long"
        bound = context["max_length" if most else "min_length"]
        count = context["actual_length"]  # None if not counted to the end
        counted = "more" if count is None else f"{count} entries"
        return f": found {counted}; expected at {'most' if most else 'least'} {bound}"
    expected = dict.fromkeys(_expected(one) for one in errors)
    return f": found {_shown(error.get('input'))}; expected {' or '.join(expected)}"


def _expected(error: Error) -> str:
    message = error["msg"].partition("\n")[0].rstrip(".")
    if template := _BY_TYPE.get(error["type"]):
        message = template.format_map(
            {"last": message.rpartition(" ")[2]} | (error.get("ctx") or {})
        )
        return re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), message)
    for start in ("Input should be ", "Input should have ", "String should have "):
        message = message.removeprefix(start)
    return message


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value[: LONGEST + 1] if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} and more"
