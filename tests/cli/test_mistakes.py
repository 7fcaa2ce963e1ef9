"""One sentence about the first mistake of what a person wrote."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from on_file import Sentence
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from attnres_serve import mistakes


class First(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["first"]
    numbers: list[Annotated[int, Field(ge=0)]] = []


class Second(BaseModel):
    kind: Literal["second", "third"]
    text: str


class Whole(BaseModel):
    one: First | Second | None = None
    stop: str | Annotated[list[str], Field(max_length=2)] | None = None
    flag: bool = False


@pytest.mark.parametrize(
    "value",
    [
        {"stop": [*"abc"]},
        {"stop": 5},
        {"stop": ["a", None]},
        {"one": {"kind": "first", "numbers": [1, -1]}},
        {"one": {"kind": "first", "more": 1}},
        {"one": {"kind": "second"}},
        {"one": {"kind": "x"}},
        {"flag": {}, "stop": 5},
        {"flag": "x" * 99},
        5,
    ],
    ids=str,
)
def test_the_first_mistake_is_one_sentence(value: Any, sentence: Sentence) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(value)
    errors = caught.value.errors()
    first = mistakes.first(errors, value).sentence
    sentence.check(first)
    placed = [{**error, "loc": ("body", *error["loc"])} for error in errors]
    assert mistakes.first(placed, value, below=1) == mistakes.first(errors, value)
    # The value is not at hand where it is read entry by entry.
    assert mistakes.first(errors).sentence == first


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Named(TypedDict):
    name: str


@dataclass
class Data:
    name: str


def _even(number: int) -> int:
    assert number % 2 == 0, "it is odd"
    return number


Tagged = Annotated[First | Second, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, "9" * 5000, " and more; expected a whole number of at most 19 digits."),
        *((int, value, "; expected a whole number.") for value in ("five", "", 1.5, [], None)),
        *((float, value, "; expected a number.") for value in ("five", "", [], None)),
        *((bool, value, "; expected true or false.") for value in ("ja", 5, 1.5, {}, None)),
        *((str, value, "; expected text.") for value in (5, None, [], b"\xff")),
        (bytes, 5, "Found 5; expected text."),
        *((kind, 5, "expected a list.") for kind in (list, set, tuple, frozenset, Iterable[int])),
        *((kind, 5, "expected an object.") for kind in (dict, Named, Data, First, Mapping)),
        (Colour, "green", "Found \"green\"; expected 'red' or 'blue'."),
        (Literal[True], 5, "Found 5; expected true."),
        (Annotated[int, Field(gt=0)], 0, "Found 0; expected more than 0."),
        (Annotated[float, Field(ge=0.5)], 0, "Found 0; expected at least 0.5."),
        (Annotated[float, Field(lt=1)], 1.5, "Found 1.5; expected less than 1."),
        (Annotated[float, Field(le=1000)], 1e9, "Found 1000000000.0; expected at most 1000."),
        (Annotated[float, Field(allow_inf_nan=False)], "nan", '"nan"; expected a finite number.'),
        (Annotated[int, Field(multiple_of=4)], 5, "Found 5; expected a multiple of 4."),
        (Annotated[str, Field(min_length=1)], "", 'Found ""; expected at least 1 character.'),
        (Annotated[str, Field(max_length=2)], "abc", '"abc"; expected at most 2 characters.'),
        (
            Annotated[str, Field(pattern="^a+$")],
            "b",
            'Found "b"; expected text of the pattern ^a+$.',
        ),
        (Annotated[list, Field(min_length=2)], [5], "Found 1 entries; expected at least 2."),
        (Annotated[list, Field(max_length=1)], [5, 6], "Found 2 entries; expected at most 1."),
        (Annotated[int, AfterValidator(_even)], 5, "It is odd."),
        (Tagged, {"kind": "x"}, "kind: found \"x\"; expected 'first', 'second', 'third'."),
        (Tagged, {}, "kind is missing; give it."),
        (Tagged, {"kind": "second", "text": 5}, "text: found 5; expected text."),
        (Data, {}, "name is missing; give it."),
        (dict[str, float], {"a": "b"}, 'a: found "b"; expected a number.'),
    ],
)
def test_every_kind_of_error_is_in_plain_words(kind: Any, value: Any, says: str) -> None:
    """What models of requests can raise, and nothing of pydantic's own words."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(value)
    errors = caught.value.errors()
    for given in (value, mistakes._UNKNOWN):
        said = mistakes.first(errors, given).sentence
        assert said.endswith(says)
    words = ("input", "valid", "string", "integer", "boolean", "dictionary", "array", "instance")
    assert not any(word in said.lower() for word in words)
