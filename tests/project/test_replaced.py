"""docs/use/replaced.md lists every function of vLLM and torch that a workaround replaces."""

import ast
import re
from pathlib import Path

import pytest
from serving import ROOT

PAGE = ROOT / "docs" / "use" / "replaced.md"
COMPAT = ROOT / "attnres_serve" / "compat"
FOLDERS = (COMPAT / "workarounds", COMPAT)
ROW = re.compile(r"\| (?P<functions>`[^|]+) \| `(?P<file>\w+\.py)` \|")


def rows(text: str) -> dict[str, set[str]]:
    """The functions of each file, as the page names them."""
    found: dict[str, set[str]] = {}
    for row in ROW.finditer(text):
        found.setdefault(row["file"], set()).update(re.findall(r"`([\w.]+)`", row["functions"]))
    return found


def replaced(source: str) -> set[str]:
    """Attributes of classes, modules and objects that a source replaces."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            is_marked = isinstance(node.value, ast.Constant)
            is_attribute = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
            if is_attribute and target.value.id != "self":
                found |= set() if is_marked or target.attr == "__code__" else {target.attr}
        if isinstance(node, ast.Tuple) and "setattr(" in source:
            found |= {leaf.value for leaf in node.elts[1:2] if isinstance(leaf, ast.Constant)}
    return found


def problems(text: str, sources: dict[str, str]) -> list[str]:
    """What the page leaves out, and what it lists that nothing replaces."""
    listed = {
        file: {name.rpartition(".")[2] for name in names} for file, names in rows(text).items()
    }
    return [
        f"{file}: {name}"
        for file in sorted({*listed, *sources})
        for name in sorted(listed.get(file, set()) ^ replaced(sources.get(file, "")))
    ]


def sources() -> dict[str, str]:
    paths: list[Path] = [*FOLDERS[0].glob("*.py"), COMPAT / "registry.py"]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_the_page_lists_what_is_replaced() -> None:
    assert problems(PAGE.read_text(encoding="utf-8"), sources()) == []


def test_every_class_of_the_page_is_named_in_its_file() -> None:
    found = sources()
    for file, names in rows(PAGE.read_text(encoding="utf-8")).items():
        for owner in {name.rpartition(".")[0] for name in names} - {""}:
            assert owner in found[file]


@pytest.mark.parametrize(
    ("page", "source", "said"),
    [
        ("| `A.run` | `a.py` |", "A.run = run", []),
        ("", "A.run = run", ["a.py: run"]),
        ("", "self.run = run", []),
        ("| `A.run`, `B.stop` | `a.py` |", "A.run = run", ["a.py: stop"]),
        ("| `A.run` | `a.py` |", "A.run = run\nrun.marked = True", []),
        ("| `A.run` | `b.py` |", "def f(cls):\n    cls.run = run", ["a.py: run", "b.py: run"]),
    ],
)
def test_a_page_that_is_stale_is_found(page: str, source: str, said: list[str]) -> None:
    assert problems(page, {"a.py": source}) == said
