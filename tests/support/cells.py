"""Runs the cells of a notebook and the blocks of a page, and compares what they show."""

import ast
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import ROOT

FILES = (ROOT / "examples" / "trace.ipynb", ROOT / "docs" / "use" / "python.md")
TEXTS = ROOT / "examples" / "texts.ipynb"
TUTORIAL = ROOT / "docs" / "use" / "tutorial.md"
COMMANDS = r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?"
BLOCKS = r"```python\n(.*?)```\n\n```text\n(.*?)```"
NUMBER = re.compile(r"-?\d+\.\d+")
# Two float32 evaluations, here and for the page, each off by 5e-4 at most
# (``trace_cases.LOGPROBS``), and half a unit of three decimals in both.
ROUNDED = 2e-3


class Cell(NamedTuple):
    """Code, and what it shows as text."""

    code: str
    shown: str


def cells_of(path: Path) -> list[Cell]:
    """The cells of a notebook or a page.

    Those of a notebook show their last expression, and a block of Python of a page the block of
    text behind it.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        pairs = re.findall(BLOCKS, content, re.S)
        assert len(pairs) == content.count("```python"), "a block has no text behind it"
        return [Cell(*pair) for pair in pairs]
    code = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    shown = [
        # Pictures, which plotting displays, are not compared.
        [out["data"]["text/plain"] for out in cell["outputs"] if "execution_count" in out]
        for cell in code
    ]
    return [
        Cell("".join(cell["source"]), "".join(map("".join, texts)))
        for cell, texts in zip(code, shown, strict=True)
    ]


def link_demo(folder: Path) -> None:
    """Let the demo be found in a folder as it is below the root and below examples/."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "demo").symlink_to(ROOT / "examples" / "demo")


def run(code: str, names: dict[str, Any]) -> str:
    """What a cell prints, and its last expression as a notebook shows it in text."""
    tree, value, out = ast.parse(code), None, io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(out):
        exec(compile(tree, "a cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "a cell", "eval"), names)
    return out.getvalue() + ("" if value is None else repr(value))


def check(path: Path) -> None:
    """Run the cells of a file one after the other; they show what is written."""
    names: dict[str, Any] = {}
    cells = cells_of(path)
    assert len(cells) > 3
    for cell in cells:
        compare(cell, run(cell.code, names))


def compare(cell: Cell, shown: str) -> None:
    """A cell shows the words that are written, and the numbers but for rounding."""
    assert words(shown) == words(cell.shown), f"{cell.code}\nshows\n{shown}"
    found, wanted = ([float(x) for x in NUMBER.findall(text)] for text in (shown, cell.shown))
    assert found == pytest.approx(wanted, abs=ROUNDED), f"{cell.code}\nshows\n{shown}"


def words(text: str) -> list[str]:
    """The text without its decimals, and without the spaces that depend on them."""
    return NUMBER.sub("0.0", text).split()


if __name__ == "__main__":
    check(Path(sys.argv[1]))
