"""What became of every fault, as a page beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.mutants.catalogue import ROOT, Fault, reasons
from tests.mutants.trial import CAUGHT

LONGEST = 40  # characters of a test's parameters
PAGE = ROOT / "tests" / "mutants" / "README.md"


def page(every: Sequence[Fault], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, in Markdown.

    Args:
        every: all faults.
        results: what ``trial.attempt`` returned, by the name of the fault.
    """
    outcomes = [results[fault.name]["outcome"] for fault in every]
    others = {name: outcomes.count(name) for name in outcomes if name != CAUGHT}
    rest = "".join(f", {count} {name}" for name, count in others.items())
    minutes = sum(results[fault.name]["seconds"] for fault in every) / 60
    lines = [
        "# Planted faults",
        "",
        "```sh",
        "make mutants",
        "```",
        "",
        f"{len(every)} faults, {outcomes.count(CAUGHT)} caught{rest}, in {minutes:.0f} minutes.",
        "",
        "Each fault is one wrong line (`tests/mutants/faults/`), planted alone in a copy of the "
        "tree, where the tests named beside it run until one fails. The command writes this page.",
        "",
        "| fault | room | what is changed | tests | caught by | seconds |",
        "|---|---|---|---|---|---:|",
    ]
    lines += [_row(fault, results[fault.name]) for fault in every]
    engine = [fault for fault in every if fault.engine]
    if engine:
        lines += ["", "Faults that only a test with an engine can catch:", ""]
        lines += [f"- {fault.name}: {fault.engine}" for fault in engine]
    lines += ["", "Test files that no fault names:", "", "| file | why |", "|---|---|"]
    lines += [f"| `{_short(file)}` | {why} |" for file, why in reasons().items()]
    return "\n".join(lines) + "\n"


def _row(fault: Fault, result: Mapping[str, Any]) -> str:
    tests = "<br>".join(f"`{_short(test)}`" for test in fault.tests)
    test, _, parameters = result["by"].partition("::")[2].partition("[")
    by = f"{test}[{parameters}" if 0 < len(parameters) <= LONGEST else test or result["by"]
    caught = f"`{by}`" if result["outcome"] == CAUGHT else f"**{result['outcome']}** {by}".strip()
    cells = fault.name, fault.room, fault.what, tests, caught, f"{result['seconds']:.0f}"
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _short(test: str) -> str:
    return test.removeprefix("tests/")
