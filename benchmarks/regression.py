"""Has the overhead grown?  A figure on file against a new run of the same measurement.

    python -m benchmarks.regression
    python -m benchmarks.regression --against FILE --loss 0.05    another figure, another limit

Measures the same shape, single pass, and fails where the lower end of the new ratio's interval
lies above the ratio on file by more than the stated loss: then it is worse, noise set aside.  A
ratio is of one processor; on another one this judges the processor too, and says so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from attnres_serve.bench import machine, report
from benchmarks import latency
from benchmarks.common import RESULTS

ON_FILE = RESULTS / "cpu-latency-768x12.json"
ALGORITHM = "single_pass"
LOSS = 0.03


def losses(before: dict[str, Any], now: dict[str, Any], loss: float) -> list[str]:
    """A sentence for every phase that has become worse.

    Args:
        before, now: overheads by phase.
        loss: by how much, as a share, the ratio may grow.
    """
    return [
        f"{phase}: the ratio was {before[phase]['ratio']:.3f} and is {now[phase]['ratio']:.3f}, "
        f"at least {now[phase]['ci95'][0]:.3f}; allowed are {limit:.3f}."
        for phase in report.PHASES
        if now[phase]["ci95"][0] > (limit := before[phase]["ratio"] * (1 + loss))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and compare; returns 1 for a loss."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, default=ON_FILE, help="default: 768 x 12")
    parser.add_argument("--loss", type=float, default=LOSS, help="allowed (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.against.is_file():
        parser.error(f"{options.against} is not there; measure it with benchmarks.latency first")
    document = json.loads(options.against.read_text())
    if document["hardware"]["cpu"] != machine.hardware()["cpu"]:
        sys.stderr.write(f"the figure on file is of another processor: {document['hardware']}\n")
    config, found = document["config"], []
    for name, before in document["results"].items():
        shape = latency.SHAPES[name]
        asked = [ALGORITHM], False, config["rounds"], config["threads"], config["steps"]
        now = latency.measure(shape, *asked)
        sys.stderr.write(f"{name}\n{report.tables(now)}\n")
        worse = losses(before["overhead"][ALGORITHM], now["overhead"][ALGORITHM], options.loss)
        found += [f"{name}, {sentence}" for sentence in worse]
    print("\n".join(found) or "no loss")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
