"""One sentence about the first mistake of what a person wrote."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    ("value", "says"),
    [
        ({"stop": [*"abc"]}, "stop: found 3 entries; expected at most 2."),
        ({"stop": 5}, "stop: found 5; expected text or a list."),
        ({"stop": ["a", None]}, "stop[1]: found null; expected text."),
        (
            {"one": {"kind": "first", "numbers": [1, -1]}},
            "one.numbers[1]: found -1; expected at least",
        ),
        ({"one": {"kind": "first", "more": 1}}, "one.more is no field that is read; leave it out."),
        ({"one": {"kind": "second"}}, "one.text is missing; give it."),
        ({"one": {"kind": "x"}}, "one.kind: found \"x\"; expected 'first' or 'second' or 'third'."),
        ({"flag": {}, "stop": 5}, "stop: found 5"),
        ({"flag": "x" * 99}, f'flag: found "{"x" * 39} and more; expected true or false'),
        (5, "Found 5; expected an object."),
    ],
)
def test_the_first_mistake_is_one_sentence(value: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(value)
    errors = caught.value.errors()
    assert mistakes.first(errors, value).sentence.startswith(says)
    placed = [{**error, "loc": ("body", *error["loc"])} for error in errors]
    assert mistakes.first(placed, value, below=1) == mistakes.first(errors, value)
    # The value is not at hand where it is read entry by entry.
    assert mistakes.first(errors).sentence.startswith(says)
