"""Which planted faults do the tests catch?  ``make mutants``, or ``python -m tests.mutants``.

Each fault of ``faults/`` is planted alone in a copy of the tree, and its tests run there.  First
they run without any fault, all at once: a test that fails anyway catches nothing.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from tests.mutants import table
from tests.mutants.catalogue import ROOT, Fault, faults, named, reasons
from tests.mutants.trial import CAUGHT, Tree, Trees, attempt

RESULTS = ROOT / "build" / "mutants.json"


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own = arguments()
    if own.files:
        why = reasons()
        for file, count in named().items():
            print(f"{file:50} {count or why.get(file, 'no fault, and no reason')}")
        return 0
    every = faults()
    chosen = [fault for fault in every if not own.only or {fault.name, fault.room} & {*own.only}]
    if not chosen:
        sys.exit(f"No fault and no room is called {' or '.join(own.only)}; see --list.")
    if own.list:
        for fault in chosen:
            print(f"{fault.room:12} {fault.name:36} {fault.what}")
        return 0
    results = json.loads(RESULTS.read_text()) if own.only and RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    with Trees(own.n) as trees:
        trees[0].check_shadows()
        if not own.planted_only:
            run_clean(chosen, trees[0])
        for fault, result in run(chosen, trees, own.seconds):
            results[fault.name] = result
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            told = f"{result['outcome']:12} {fault.room:14} {fault.name:36}"
            print(f"{told} {result['seconds']:6.1f} s  {result['by']}", flush=True)
    if all(fault.name in results for fault in every):
        table.PAGE.write_text(table.page(every, results), encoding="utf-8")
    caught = sum(results[fault.name]["outcome"] == CAUGHT for fault in chosen)
    print(f"{caught} of {len(chosen)} faults were caught.")
    return 0 if caught == len(chosen) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="faults or rooms; what build/mutants.json says of the others is kept",
    )
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument(
        "--files",
        action="store_true",
        help="list the test files with the number of faults that name each, and run nothing",
    )
    parser.add_argument("-n", type=int, default=1, help="faults at a time (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="for the tests of a fault (default: 600)"
    )
    parser.add_argument(
        "--planted-only", action="store_true", help="leave out the tests without any fault"
    )
    return parser.parse_args()


def run_clean(chosen: Sequence[Fault], tree: Tree) -> None:
    """Run the tests of all faults on the right code; exit if one fails."""
    for engine in (False, True):
        tests = {test for fault in chosen if bool(fault.engine) is engine for test in fault.tests}
        if tests:
            print(f"Without a fault: {len(tests)} files or tests", flush=True)
            status, output = tree.run(sorted(tests), engine, 3600)
            if status != 0:
                sys.exit(f"{output}\nThese tests fail without any fault.")


def run(
    chosen: Sequence[Fault], trees: Sequence[Tree], seconds: float
) -> Iterator[tuple[Fault, dict[str, Any]]]:
    """Plant each fault; gives what became of it, in the order of the faults."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(fault: Fault) -> dict[str, Any]:
        tree = free.get()
        try:
            return attempt(fault, tree, seconds)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        try:
            yield from zip(chosen, pool.map(one, chosen), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.end()
            raise


if __name__ == "__main__":
    sys.exit(main())
