"""The project's words: each is in the glossary, and a new one is noticed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from serving import ROOT

FOLDERS = ("attnres_serve", "kernels", "server")
MOST = 55
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a name in any spelling
# Terms of the field and plain English, as they stand in names of modules and classes.
TERMS = {*Path(__file__).with_name("terms.txt").read_text(encoding="utf-8").split()}


def glossary() -> list[str]:
    """The first column of the glossary."""
    _, _, text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Glossary")
    rows = re.findall(r"^\| ([^|]+) \|", text, re.M)
    return [row for row in rows if row != "word"]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):  # which follows no links
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def named() -> Iterator[str]:
    """The words in the names of modules and classes."""
    for path, tree in sources():
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for name in (path.stem, *classes):
            yield from map(str.lower, WORD.findall(name))


def test_the_glossary_is_short_and_has_every_row_once() -> None:
    rows = glossary()
    assert 40 < len(rows) <= MOST
    assert len({*rows}) == len(rows)


def test_a_new_word_is_in_the_glossary_or_a_term_of_the_field() -> None:
    """Add it to the glossary in docs/index.md; terms.txt is for words that everybody knows."""
    known = TERMS | {word.lower() for row in glossary() for word in WORD.findall(row)}
    used = {*named()}
    assert sorted(word for word in used if not {word, word.removesuffix("s")} & known) == []
    assert sorted(word for word in TERMS if not {word, f"{word}s"} & used) == [], "no name has it"


def test_a_check_raises_and_a_problem_is_a_sentence_or_none() -> None:
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.lstrip("_")
                first = name.split("_")[0]
                returned = "" if node.returns is None else ast.unparse(node.returns)
                is_problem = f"_{name}".endswith("_problem")
                if is_problem and first != "set" and returned != "str | None":
                    wrong.append(f"{path.name}: {node.name} returns {returned}")
                if first in ("check", "require") and returned == "bool":
                    wrong.append(f"{path.name}: {node.name} returns {returned}")
    assert wrong == []
