"""The engine of ``attnres-serve bench`` with every step made longer: what ``detection`` plants."""

import sys
import time

from attnres_serve.bench import engine

SHARE = 0.05


class Slowed(engine.Bench):
    """An engine whose steps take ``SHARE`` longer."""

    def __init__(self, flags: list[str]) -> None:
        super().__init__(flags)
        step = self.engine.step

        def slower():
            begin = time.perf_counter()
            outputs = step()
            until = begin + (1 + SHARE) * (time.perf_counter() - begin)
            while time.perf_counter() < until:
                pass
            return outputs

        self.engine.step = slower


if __name__ == "__main__":
    engine.Bench = Slowed
    engine.main(sys.argv[1:])
