"""What a served model costs whose edits may change, one with statistics, and one that is pruned.

    python -m benchmarks.serving.edits --out benchmarks/results/cpu-edits.json
    python -m benchmarks.serving.edits --quick      does it work: tiny model, two rounds, eager

Three servers of one model take turns with vLLM's client and the same prompts, which are new in each
round: as it is, with ``--enable-attnres-edits`` (a bias for every source), and with a mask of every
other block at all sites (``--attnres-edit``).  The second takes another turn while it keeps
statistics.  The first round does not count.  A ratio is to the first server in one round; the
interval is over rounds, of one start.
"""

import argparse
import os
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from attnres_serve.bench.ratios import paired_ratios, ratio_summary
from benchmarks.common import publish
from benchmarks.serving import load, one_billion
from benchmarks.serving.models import FLAGS
from benchmarks.serving.shapes import LLAMAS, QUICK, Shape

CHANGING = ["--enable-attnres-edits"]
PRUNED = [f'--attnres-edit=mask sources="block {block}"' for block in (1, 3, 5, 7)]
SERVERS = {"as it is": [], "edits change": CHANGING, "pruned": PRUNED}
COUNTING = "edits change, statistics"  # the second server once more
AT_A_TIME = (1, 8)
ROUNDS = 8
STATISTICS = "/v1/attn_res/statistics"
BASELINE = "as it is"


def count(url: str, step: str) -> None:
    """Have a server begin or end its statistics."""
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{url}{STATISTICS}/{step}", headers=headers, timeout=60).raise_for_status()


def ask(urls: dict[str, str], name: str, at_a_time: int, seed: int) -> dict[str, float]:
    """What vLLM's client finds of one server in one round."""
    if name != COUNTING:
        return load.load(urls[name], at_a_time, seed)
    url = urls["edits change"]
    count(url, "start")
    try:
        return load.load(url, at_a_time, seed)
    finally:
        count(url, "stop")


def measure(
    shape: Shape, rounds: int, flags: list[str]
) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Figures of every round, by requests at a time and by server."""
    names = [*SERVERS, COUNTING]
    figures: Any = {at_a_time: {name: [] for name in names} for at_a_time in AT_A_TIME}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        one_billion.write(shape, folder)
        urls = {
            name: stack.enter_context(load.serving(load.OURS, folder, [*flags, *more]))
            for name, more in SERVERS.items()
        }
        for number in range(rounds + 1):
            order = names if number % 2 else names[::-1]
            for at_a_time in AT_A_TIME:
                for name in order:
                    figures[at_a_time][name].append(ask(urls, name, at_a_time, number))
    return figures


def compare(figures: dict[int, dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """A row for each load, figure and server: the ratio to the first, and all values."""
    rows = []
    for at_a_time, by_name in figures.items():
        for figure in load.FIGURES:
            values = {name: [one[figure] for one in rounds[1:]] for name, rounds in by_name.items()}
            baseline = values.pop(BASELINE)
            for name, ours in values.items():
                ratios = [[ratio] for ratio in paired_ratios(ours, baseline)]
                summary = ratio_summary(ratios)
                row = {"at_a_time": at_a_time, "figure": figure, "server": name, **summary}
                rows.append(row | {"values": ours, BASELINE: baseline})
    return rows


def main() -> int:
    """Measure, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="that count")
    parser.add_argument("--quick", action="store_true", help="tiny, two rounds, eager: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    options = parser.parse_args()
    os.environ["VLLM_API_KEY"] = os.environ["OPENAI_API_KEY"] = secrets.token_urlsafe()
    flags = [*FLAGS[1:], "--no-enable-prefix-caching"]  # the first has no weights read
    name, shape, rounds = "768x12", LLAMAS["768x12"], options.rounds
    if options.quick:
        name, shape, rounds, flags = "128x4", QUICK["128x4"], 2, [*flags, "--enforce-eager"]
    results = compare(measure(shape, rounds, flags))
    for row in results:
        what = f"{row['at_a_time']} at a time, {row['figure']}, {row['server']}"
        sys.stderr.write(f"{what}: {row['ratio']:.3f} {row['ci95']}\n")
    publish(
        "serving.edits",
        sys.argv[1:],
        options.out,
        quick=options.quick,
        config={"shape": name, "flags": flags, "rounds": rounds, "interval": "over rounds"},
        results=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
