"""How long a measurement is: how often the engines are started, and how often they are asked then.

Two processes of one model differ by a percent and more, by where their memory lies, so that rounds
of one start cannot tell a small cost from luck, however many they are.  Eight starts of four rounds
are usual because of what ten runs of one start showed (a Llama of 768 x 12, eager, one cell for
each phase).  In prefill the ratio of a pair of processes scatters by 1.1 %, that of a round by
1.3 %; then the median of a start's four rounds scatters by 1.3 %, and Student's interval over eight
starts reaches 1.1 % to both sides, and not above 1.5 % in nine runs of ten; over six starts, in two
of three.  More rounds hardly narrow it.  ``tests/test_bench.py`` draws such runs.  And in an even
number of starts every engine is started before another as often as behind it.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from attnres_serve.errors import SettingError

FEWEST_ROUNDS = 6  # of a single start: fewer have no bootstrap interval of 95 %
ROUNDS_OF_ONE = 20  # of a single start, or of a server that is not ours to start


@dataclass(frozen=True)
class Length:
    """A length.

    Attributes:
        starts: how often every engine is started, each time in a new process.
        rounds: of each start, beside those discarded.
    """

    starts: int
    rounds: int

    def told(self) -> dict[str, Any]:
        """What a document says of it: the numbers, and over what its intervals are (``ratios``)."""
        method = "bootstrap over rounds" if self.starts == 1 else "Student's over starts"
        return {**asdict(self), "interval": method}


USUAL = Length(starts=8, rounds=4)
TRIAL = Length(starts=1, rounds=6)  # no evidence


def add_length(parser: argparse.ArgumentParser, usual: Length) -> None:
    """The flags; ``usual`` is what holds without them."""
    parser.add_argument(
        "--starts",
        type=int,
        metavar="N",
        help=f"of every engine, each in a new process (default: {usual.starts})",
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
    return Length(starts, rounds)
