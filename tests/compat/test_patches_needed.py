"""Each workaround is for versions of vLLM and torch that have its fault, and mends them."""

import json
import os
from pathlib import Path

import forks
import pytest

pytest.importorskip("vllm")

from tests.compat import faults
from tests.compat.faults import Tried

pytestmark = pytest.mark.versions
SCRIPT = """
import dataclasses, json, pathlib
from tests.compat import faults
{before}
found = dataclasses.asdict(faults.try_out({name!r}))
pathlib.Path({answer!r}).write_text(json.dumps(found))
"""
SHOWN = [name for name in faults.names() if faults.reason(name) is None and faults.is_tried(name)]


def tried(name: str, folder: Path, before: str = "") -> Tried:
    """What a fault shows in a process of its own, which runs ``before`` first."""
    script, log, answer = folder / "try.py", folder / "log", folder / "found.json"
    script.write_text(SCRIPT.format(name=name, before=before, answer=str(answer)))
    env = os.environ | {"PYTHONPATH": str(forks.ROOT)}
    process = forks.python(str(script), log=log, env=env)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    return Tried(**json.loads(answer.read_text()))


def test_every_workaround_has_a_fault_or_says_why_not() -> None:
    there = {path.stem for path in faults.FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert there ^ faults.CANNOT.keys() == {*faults.names()}
    assert all(why.endswith(".") and "\n" not in why for why in faults.CANNOT.values())


@pytest.mark.parametrize("name", SHOWN)
def test_a_workaround_is_needed_and_mends(name: str, tmp_path: Path) -> None:
    problem = tried(name, tmp_path).problem(name)
    assert problem is None, problem


@pytest.mark.parametrize("name", ["rotary", "dead_engine", "rows_without_adapter"])
def test_a_library_that_has_mended_a_fault_is_found(name: str, tmp_path: Path) -> None:
    """What the workaround makes stands for what a later version has."""
    result = tried(name, tmp_path, f"faults.apply({name!r})")
    assert result.problem(name) == (
        f"{result.library} has mended this: end the range of workarounds/{name}.py before it"
    )


@pytest.mark.parametrize(
    ("due", "without", "within", "message"),
    [
        (True, True, False, None),
        (False, False, False, None),
        (True, False, False, "vLLM 1 has mended this: end the range of workarounds/a.py before it"),
        (
            False,
            True,
            True,
            "vLLM 1 has this fault again: extend the range of workarounds/a.py to it",
        ),
        (True, True, True, "workarounds/a.py does not mend vLLM 1"),
    ],
)
def test_what_is_to_be_changed(due: bool, without: bool, within: bool, message: str | None) -> None:
    assert Tried("vLLM 1", due, without, within).problem("a") == message
