"""Has the overhead grown?  A figure on file against a new run of the same measurement.

    python -m benchmarks.serving.regression
    python -m benchmarks.serving.regression --against FILE --loss 0.05    another figure and limit

Measures the same shape, single pass, with as many starts and rounds.  What is allowed is the ratio
on file and the stated loss.  Where the new ratio's interval lies above that, it is worse, noise set
aside: status 1.  Where it lies below, there is no loss: status 0.  Where it has it inside, nothing
is shown, and it takes a quieter machine or a file of more starts: status 2.  A figure by another
procedure is refused.  A ratio is of one processor and of its versions; with others this judges them
too, and says so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from attnres_serve.bench import machine, report
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.workload import PHASES
from benchmarks.common import RESULTS, Length
from benchmarks.serving import latency
from benchmarks.serving.models import FLAGS
from benchmarks.serving.shapes import LLAMAS

ON_FILE = RESULTS / "cpu-latency-768x12.json"
ALGORITHM = "single_pass"
LOSS = 0.03
SAME, WORSE, UNDECIDED = 0, 1, 2  # also the statuses
WORDS = {SAME: "no loss", WORSE: "a loss", UNDECIDED: "not decided, the interval is too wide"}


def judge(before: float, now: dict[str, Any], loss: float) -> tuple[int, str]:
    """Exit status of a new overhead against a ratio on file, and a sentence about it.

    Args:
        before: the ratio.
        now: the overhead, with its ratio and interval.
        loss: by how much, as a share, the ratio may grow.
    """
    low, high = now["ci95"]
    limit = before * (1 + loss)
    verdict = WORSE if low > limit else SAME if high <= limit else UNDECIDED
    return verdict, (
        f"{WORDS[verdict]}; the ratio was {before:.3f} and is {now['ratio']:.3f} ({low:.3f} to "
        f"{high:.3f}), allowed are {limit:.3f}"
    )


def usable(path: Path) -> dict[str, Any]:
    """The document of a file, if it can be measured again.

    Raises:
        ValueError: saying what it should be.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); measure it first.") from None
    try:
        document = json.loads(text)
        config = document["config"]
        if (
            document["benchmark"] == "latency"
            and not document["quick"]
            and (config["procedure"], config["flags"]) == (PROCEDURE, list(FLAGS))
            and all(ALGORITHM in one["overhead"] for one in document["results"].values())
            and document["results"].keys() <= LLAMAS.keys()
        ):
            return document
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{path} is no measurement that can be made again; expected a document of "
        f"benchmarks.serving.latency of {ALGORITHM}, without --quick and by procedure {PROCEDURE}; "
        "measure it first."
    )


def differences(document: dict[str, Any]) -> list[str]:
    """Differences, except in the code, between this machine and the one of a document."""
    here = machine.hardware() | machine.versions()
    here["threads"] = machine.cores()
    there = document["hardware"] | document["versions"] | document["config"]
    ignored = ("attnres_serve", "attnres_serve_source", "memory_gib")
    return [
        f"{key}: {there.get(key)} on file, {here[key]} here"
        for key in here
        if key not in ignored and there.get(key) != here[key]
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and compare; returns the worst verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, default=ON_FILE, help="default: 768 x 12")
    parser.add_argument("--loss", type=float, default=LOSS, help="allowed (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        document = usable(options.against)
    except ValueError as error:
        parser.error(str(error))
    for difference in differences(document):
        sys.stderr.write(f"not alike: {difference}\n")
    config, verdicts = document["config"], set()
    for name, before in document["results"].items():
        length = Length(config["starts"], config["rounds"])
        now = latency.measure(LLAMAS[name], [ALGORITHM], False, length)
        sys.stderr.write(f"{name}\n{report.tables(now)}\n")
        for phase in PHASES:
            then = before["overhead"][ALGORITHM][phase]["ratio"]
            verdict, sentence = judge(then, now["overhead"][ALGORITHM][phase], options.loss)
            verdicts.add(verdict)
            print(f"{name}, {phase}: {sentence}")
    return WORSE if WORSE in verdicts else max(verdicts)


if __name__ == "__main__":
    sys.exit(main())
