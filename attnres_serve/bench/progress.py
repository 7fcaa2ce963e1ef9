"""Progress of a measurement on stderr while it runs.

A terminal has one live line: the time, the ratios with their intervals as they narrow, and what is
asked for.  Anything else, a file or a pipe, gets one plain line for each start.
"""

from collections.abc import Sequence
from threading import Event, Thread

from tqdm import tqdm

from attnres_serve import output
from attnres_serve.bench.budget import Budget
from attnres_serve.bench.measure import Results
from attnres_serve.bench.overhead import overheads, told


class Progress:
    """The progress of a measurement, as a context.

    Args:
        budget: whose time is told.
        names: of the engines; the first is the baseline.
        requests: of each start.
        tells_ratios: whether ratios are shown before the measurement's end.
    """

    def __init__(
        self, budget: Budget, names: Sequence[str], requests: int, tells_ratios: bool = True
    ) -> None:
        self.budget, self.tells_ratios = budget, tells_ratios
        self.baseline, *self.others = names
        self.number = 0
        self.ratios = self.what = ""
        self._closed = Event()
        self._ticking = Thread(target=self._tick, daemon=True)
        self.bar = output.bar(total=requests, bar_format="|{bar:12}| {desc}")

    def __enter__(self) -> "Progress":
        if not self.bar.disable:
            self._ticking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._ticking.is_alive():
            self._ticking.join()
        self.bar.close()

    def start(self) -> None:
        """The next start begins."""
        self.number += 1
        self.bar.reset()

    def step(self, what: str) -> None:
        """An engine is asked for something, or started."""
        self.what = what
        self.bar.total = max(self.bar.total, self.bar.n + 1)  # of a start that goes on
        self.bar.update()
        self._draw()

    def _tick(self) -> None:
        """Let the time go on in the live line while an engine starts, which takes minutes."""
        while not self._closed.wait(1.0):
            self._draw()

    def _draw(self) -> None:
        words = f"start {self.number}, {self.budget.told()}", self.ratios, self.what
        self.bar.set_description_str("; ".join(filter(None, words)))

    def show(self, results: Sequence[Results]) -> None:
        """Show the ratios of these starts, the last of which may be under way."""
        if self.tells_ratios:
            self.ratios = ", ".join(self._ratios(name, results) for name in self.others)

    def end_of_start(self, results: Sequence[Results]) -> None:
        """Show the ratios of all starts; where there is no live line, as a line."""
        self.show(results)
        if self.bar.disable:
            ratios = f": {self.ratios}" if self.ratios else ""
            over = " over its rounds" if ratios and self.number == 1 else ""
            self.say(f"start {self.number} done after {self.budget.told()} minutes{ratios}{over}")

    def say(self, sentence: str) -> None:
        """Show a sentence above the live line."""
        tqdm.write(sentence, file=output.err())

    def _ratios(self, name: str, results: Sequence[Results]) -> str:
        phases = overheads(results, name, self.baseline)
        whose = f"{name} " if len(self.others) > 1 else ""
        return whose + ", ".join(f"{phase} {told(found)}" for phase, found in phases.items())
