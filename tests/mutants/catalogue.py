"""The planted faults as data: one TOML file a room in ``faults/``.

A file gives ``tests`` (and ``where``) for all its faults; a fault may have its own.  ``where`` is a
file, or a folder in whose sources the line is looked for, so that a fault outlives a file's move
within its room.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("faults")
REASONS = Path(__file__).with_name("unnamed.toml")
SOURCES = {".py", ".js", ".cpp", ".h"}


class MisplacedError(Exception):
    """A fault that cannot be planted; the message says why."""


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        room: the file of ``faults/`` that names it.
        name: unique among all faults.
        what: what is wrong with the line, in a few words.
        where: file or folder, below the root of the repository.
        line: the right line without its indentation; it stands once in ``where``.
        becomes: the wrong line, indented as the right one.
        tests: what is given to pytest, the fastest first.
        after: a line above ``line`` in the file, for a line that stands several times; the first
            one behind it is meant.
        engine: why no test without an engine can catch it; empty for a fault that one catches.
    """

    room: str
    name: str
    what: str
    where: str
    line: str
    becomes: str
    tests: tuple[str, ...]
    after: str = ""
    engine: str = ""

    def place(self, root: Path = ROOT) -> tuple[Path, int]:
        """The file below ``root`` that holds the line, and its number from 0.

        Raises:
            MisplacedError: the line stands in no file, or several times.
        """
        found = [(path, at) for path in _sources(root / self.where) for at in self._lines(path)]
        if len(found) != 1:
            raise MisplacedError(f"{self.where} has {self.line!r} {len(found)} times, not once.")
        return found[0]

    def planted(self, path: Path, at: int) -> str:
        """The text of a file with the wrong line.

        Raises:
            MisplacedError: the text is not Python any more.
        """
        lines = path.read_text(encoding="utf-8").splitlines()
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at] = indent + self.becomes
        text = "\n".join(lines) + "\n"
        if path.suffix == ".py":
            try:
                compile(text, str(path), "exec")
            except SyntaxError as error:
                raise MisplacedError(f"{self.becomes!r} is no Python there ({error}).") from None
        return text

    def _lines(self, path: Path) -> list[int]:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        same = [at for at, line in enumerate(lines) if line == self.line]
        if not self.after:
            return same
        if lines.count(self.after) != 1:
            return []
        return [at for at in same if at > lines.index(self.after)][:1]


def faults() -> list[Fault]:
    """All of them, room by room."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        shared = {key: value for key, value in content.items() if key != "fault"}
        for one in content["fault"]:
            stated = shared | one
            found.append(Fault(room=path.stem, **stated | {"tests": tuple(stated["tests"])}))
    return found


def named() -> dict[str, int]:
    """The number of faults that name each test file, by its path below the root."""
    each = ({test.partition("::")[0] for test in fault.tests} for fault in faults())
    counts = Counter(file for files in each for file in files)
    paths = (path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return {path.as_posix(): counts[path.as_posix()] for path in paths}


def reasons() -> dict[str, str]:
    """Why no fault names a test file, by its path below the root."""
    found: dict[str, str] = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    return found


def _sources(where: Path) -> Iterator[Path]:
    if where.is_file():
        yield where
        return
    yield from (path for path in sorted(where.rglob("*")) if path.suffix in SOURCES)
