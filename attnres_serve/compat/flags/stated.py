"""A flag that a file or a variable states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from attnres_serve.errors import SettingError


class Stated(NamedTuple):
    """A flag in a file or a variable.

    Attributes:
        argv: its arguments on a command line; empty if the value is the default.
        place: its place, as the beginning of an error.
    """

    argv: list[str]
    place: str


@contextmanager
def at(place: str) -> Iterator[None]:
    """Let errors begin with a place."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{place}: {error}") from None
