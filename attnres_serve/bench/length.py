"""Length of a measurement: how often engines are started, and how often they are asked then.

Two processes of one model differ by a percent and more, by where their memory lies, so that rounds
of one start cannot tell a small cost from luck, however many they are.  By how much differs from
machine to machine: the ratio of two processes of a Llama of 768 x 12 scattered by 1.1 % on one, by
3.7 % on another.  So the usual measurement goes on until its intervals are narrow: eight starts of
four rounds on the first machine, some twenty-four on the other.  More rounds hardly narrow them.
That its width decides when to stop makes an interval hold a little less often than in 95 % of runs:
93 to 96 % of those that a computer drew (``test_bench.py``).  Not so where luck stopped it
early: where processes scatter by 2 %, one run in six stops at eight, and 90 % of those hold.

It is looked at after even numbers of starts, in which every engine was started before another as
often as behind it.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from attnres_serve.errors import SettingError

FEWEST_ROUNDS = 6  # of a single start: fewer have no bootstrap interval of 95 %
ROUNDS_OF_ONE = 20  # of a single start, or of a server that is not ours to start
NARROW = 0.015  # half of an interval


@dataclass(frozen=True)
class Until:
    """The end that a measurement goes on for.

    Attributes:
        half_width: of every ratio's interval, as a share; it is enough where none is wider.
        starts: then it ends, wide or not.
    """

    half_width: float
    starts: int


@dataclass(frozen=True)
class Length:
    """A length.

    Attributes:
        starts: how often every engine is started, each time in a new process; at least.
        rounds: of each start, beside those discarded.
        until: for what there are more starts; None for no more.
    """

    starts: int
    rounds: int
    until: Until | None = None

    def is_enough(self, starts: int, half_width: Callable[[], float]) -> bool:
        """True if a measurement may end.

        Args:
            starts: that were made.
            half_width: of the widest interval, asked where it matters.
        """
        if self.until is None or starts >= self.until.starts:
            return starts >= self.starts
        return starts >= self.starts and starts % 2 == 0 and half_width() <= self.until.half_width

    def told(self, starts: int, rounds: int | None = None) -> dict[str, Any]:
        """Content of a document about the length, and what its intervals are over (``ratios``).

        Args:
            starts: that were made.
            rounds: that were made in each; None for as many as there should be.
        """
        method = "bootstrap over rounds" if starts == 1 else "Student's over starts"
        return asdict(self) | {
            "starts": starts,
            "rounds": rounds or self.rounds,
            "interval": method,
        }


USUAL = Length(starts=8, rounds=4, until=Until(NARROW, starts=32))
TRIAL = Length(starts=1, rounds=6)  # no evidence


def add_length(parser: argparse.ArgumentParser, usual: Length) -> None:
    """The flags; ``usual`` is what holds without them."""
    parser.add_argument(
        "--starts",
        type=int,
        metavar="N",
        help=f"of every engine, each in a new process (default: {_told(usual)})",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"of each start (default: {usual.rounds}; of a single one: {ROUNDS_OF_ONE})",
    )


def length_of(starts: int | None, rounds: int | None, usual: Length) -> Length:
    """The length that was asked for.

    Args:
        starts, rounds: None for those of ``usual``.
        usual: whose rounds, where it has several starts, are too few for a single one.

    Raises:
        SettingError: there is no interval for so few.
    """
    until = usual.until if starts is None else None
    starts = usual.starts if starts is None else starts
    if rounds is None:
        rounds = ROUNDS_OF_ONE if starts == 1 < usual.starts else usual.rounds
    if starts < 1:
        raise SettingError(f"--starts is {starts}; expected at least 1.")
    if rounds < 1:
        raise SettingError(f"--rounds is {rounds}; expected at least 1.")
    if starts == 1 and rounds < FEWEST_ROUNDS:
        raise SettingError(
            f"--rounds is {rounds}; expected at least {FEWEST_ROUNDS} with one start, whose "
            "interval is over its rounds."
        )
    return Length(starts, rounds, until)


def _told(length: Length) -> str:
    if length.until is None:
        return str(length.starts)
    most, width = length.until.starts, length.until.half_width
    return f"{length.starts} to {most}, until every ratio is known to {100 * width:.1f} %%"
