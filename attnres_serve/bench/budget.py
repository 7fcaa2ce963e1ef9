"""A time budget: whether one more start, or one more round, would end before it is spent.

A start cannot be cut short without losing it, so the decision comes before it: by the longest start
so far, and a margin.  The first start compiled, so it counts only while there is no other.  The
first start itself is always finished, however long it takes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

MINUTES = 10.0  # of ``attnres-serve bench``
MARGIN = 1.1  # of an estimate: starts of one measurement differ by some percent


class Budget:
    """Seconds that a measurement may take, counted from here on.

    Args:
        seconds: infinity for no budget.
        clock: seconds since some moment.
    """

    def __init__(self, seconds: float = inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._begin = clock()

    @property
    def spent(self) -> float:
        """Seconds since the beginning, without those of ``paused``."""
        return self._clock() - self._begin

    def has_room_for(self, seconds: float) -> bool:
        """True if work that is estimated to take ``seconds`` would end within the budget."""
        return self.spent + MARGIN * seconds <= self.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the time of the context out of the count."""
        begin = self._clock()
        yield
        self._begin += self._clock() - begin

    def told(self) -> str:
        """Minutes and seconds spent, of how many there are."""
        of = "" if self.seconds == inf else f" of {clock_time(self.seconds)}"
        return clock_time(self.spent) + of


def next_start(took: Sequence[float]) -> float:
    """An estimate of the next start's seconds by those that the earlier starts took."""
    return max(took[1:] or took)


def clock_time(seconds: float) -> str:
    """Seconds as minutes and seconds: ``3:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
