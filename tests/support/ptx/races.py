"""Who touched which byte, and whether that was in an order."""

import numpy as np

from ptx.errors import RaceError

_AGENTS = 20  # bits of a mark for its agent; the others are its epoch


class Races:
    """Bytes of a memory, and the agents (warps, or programs) that touch them.

    Within an epoch agents are in no order.  Of each byte the first reader and the first writer are
    known, and whether there were others.  Writing the value that is there already is no conflict
    with another writer: threads that hold the same element may all store it.
    """

    def __init__(self, size: int, agents: str) -> None:
        self._agents = agents
        self._epoch = 1
        self._first = {kind: np.zeros(size, np.int64) for kind in ("read", "written")}
        self._several = {kind: np.zeros(size, np.int64) for kind in ("read", "written")}

    def next_epoch(self) -> None:
        """Put all that was done before all that follows."""
        self._epoch += 1

    def read(self, at: np.ndarray, agent: np.ndarray) -> None:
        """Note reads of the bytes ``at``, each by the agent that stands at its place.

        Raises:
            RaceError: if another agent has written one in this epoch.
        """
        self._refuse(self._others("written", at, agent), "read", "written")
        self._note("read", at, agent)

    def write(self, at: np.ndarray, agent: np.ndarray, changes: np.ndarray) -> None:
        """Note writes; ``changes`` says which bytes get a value that they do not have.

        Raises:
            RaceError: if another agent has read one in this epoch, or written another value.
        """
        self._refuse(self._others("read", at, agent), "written", "read")
        self._refuse(self._others("written", at, agent) & changes, "written", "written")
        self._note("written", at, agent)

    def _others(self, kind: str, at: np.ndarray, agent: np.ndarray) -> np.ndarray:
        first = self._first[kind][at]
        touched = first >> _AGENTS == self._epoch
        other = first != (self._epoch << _AGENTS | agent)
        return touched & (other | (self._several[kind][at] == self._epoch))

    def _note(self, kind: str, at: np.ndarray, agent: np.ndarray) -> None:
        mark = self._epoch << _AGENTS | agent
        first, several = self._first[kind], self._several[kind]
        fresh = first[at] >> _AGENTS != self._epoch
        first[at[fresh]] = mark[fresh]
        several[at[first[at] != mark]] = self._epoch

    def _refuse(self, conflicts: np.ndarray, now: str, before: str) -> None:
        if conflicts.any():
            raise RaceError(
                f"{int(conflicts.sum())} bytes are {now} that another of the {self._agents} "
                f"has {before} in no order"
            )
