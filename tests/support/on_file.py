"""What errors say in tests, in full: ``tests/sentences/ROOM.json`` has it by the test's id."""

import json
import re
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS, RENEW = Path(__file__).parents[1], "--renew-sentences"
COLLECTED: set[str] = set()  # ids of tests
PASSED = pytest.StashKey[bool]()  # of a test: whether it passed, before its fixtures end
PREFIX = "attnres-serve: "  # of a command
CUT = re.compile(r"\(cut from \d+ letters; the whole is in (\S+)\)$")
# What libraries say in other words in each version, in parentheses at the end of a clause.
LIBRARY = re.compile(r"\((?:Error while |Expecting |Weights only |\w+Error: ).*?\)(?=;)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(RENEW, action="store_true", help="put what errors say in tests on file")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not any("::" in word for word in item.config.args):  # else a part of a file's tests
        COLLECTED.add(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


def path_of(room: str) -> Path:
    return TESTS / "sentences" / f"{room}.json"


@cache
def on_file(room: str) -> dict[str, list[str]]:
    path = path_of(room)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def without_a_test(room: str) -> list[str]:
    """The entries of files that were collected, of which no test is any more."""
    files = {test.partition("::")[0] for test in COLLECTED}
    tests = {key: f"tests/{room}/{key}" for key in on_file(room)}
    return [k for k, t in tests.items() if t.partition("::")[0] in files and t not in COLLECTED]


class Sentence:
    """The sentences of a test, in their order."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        _, self.room, self.key = request.node.nodeid.split("/", 2)
        self.renews, self.said = request.config.getoption(RENEW), list[str]()
        assert not (self.renews and hasattr(request.config, "workerinput")), f"{RENEW} without -n"
        self.expected = on_file(self.room).get(self.key, [])
        self.places = {}  # what depends on the machine; a temporary folder may lie in the root
        if "tmp_path" in request.fixturenames:
            self.places[str(request.getfixturevalue("tmp_path"))] = "{tmp_path}"
        self.places[str(TESTS.parent)] = "{root}"

    def check(self, text: str | None) -> str:
        """Compare a sentence with the one on file; returns the whole, also of one that was cut."""
        assert text, "no sentence"
        if cut := CUT.search(text.strip()):
            text = PREFIX * text.startswith(PREFIX) + Path(cut[1]).read_text(encoding="utf-8")
        whole = text
        for place, name in self.places.items():
            text = text.replace(place, name)
        self.said.append(LIBRARY.sub("({library})", text).removesuffix("\n"))
        assert "\n" not in self.said[-1], f"two lines are no sentence: {text}"
        if not self.renews and self.said != self.expected[: len(self.said)]:
            filed = self.expected[len(self.said) - 1 : len(self.said)] or ["nothing"]
            pytest.fail(f"said:    {self.said[-1]}\non file: {filed[0]}\n{self.advice}", False)
        return whole

    @property
    def advice(self) -> str:
        command = f"pytest {RENEW} tests/{self.room}/{self.key.partition('::')[0]}"
        return f"If what was said is right, put it in {path_of(self.room).name}: `{command}`."

    def raises(self, kind: Any, call: Callable[..., Any], /, *args: Any, **options: Any) -> str:
        """As ``pytest.raises`` of a call; returns the sentence, which is that on file."""
        with pytest.raises(kind) as caught:
            call(*args, **options)
        return self.check(str(caught.value))

    def end(self) -> None:
        """Write the sentences, or see that none is left on file."""
        table = on_file(self.room)
        if not self.renews:
            assert self.said == self.expected, f"{self.expected} was not said. {self.advice}"
        elif self.said != self.expected or without_a_test(self.room):
            for key in (self.key, *without_a_test(self.room)):
                table.pop(key, None)
            table |= {self.key: self.said} if self.said else {}
            text = json.dumps(table, ensure_ascii=False, indent=1, sort_keys=True)
            path_of(self.room).write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def sentence(request: pytest.FixtureRequest) -> Iterator[Sentence]:
    """The sentences of the test; ``check`` and ``raises`` compare them with those on file."""
    result = Sentence(request)
    yield result
    if request.node.stash.get(PASSED, False):
        result.end()
