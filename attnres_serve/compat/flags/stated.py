"""A flag that is stated by its name and a value, in a file or in a variable."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from attnres_serve.errors import SettingError


class Stated(NamedTuple):
    """One such flag.

    Attributes:
        argv: it has on a command line; none where it says what holds without it.
        place: where it stands, as a sentence begins that refuses it.
    """

    argv: list[str]
    place: str


@contextmanager
def at(place: str) -> Iterator[None]:
    """Let a refusal begin with the place of what is refused."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{place}: {error}") from None
