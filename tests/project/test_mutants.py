"""The list of planted faults does not rot; ``make mutants`` plants them."""

from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Fault, MisplacedError, faults, named, reasons

ALL = faults()


def test_names_are_unique() -> None:
    assert not [name for name, times in Counter(fault.name for fault in ALL).items() if times > 1]


def test_there_are_enough_and_few_need_an_engine() -> None:
    assert len(ALL) >= 60
    assert sum(bool(fault.engine) for fault in ALL) < 50


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """Its line stands once, another takes its place, and its tests exist."""
    path, at = fault.place()
    assert fault.line != fault.becomes
    assert fault.planted(path, at) != path.read_text(encoding="utf-8")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test


def test_every_test_file_is_named_by_a_fault_or_has_a_reason() -> None:
    """And no file has both."""
    assert {file for file, count in named().items() if not count} == reasons().keys()
    assert all(why.endswith(".") and "\n" not in why for why in reasons().values())


def test_a_line_that_stands_twice_is_refused() -> None:
    twice = Fault("compat", "x", "x", "tests/project/test_mutants.py", "", "pass", ())
    with pytest.raises(MisplacedError, match="not once"):
        twice.place()
