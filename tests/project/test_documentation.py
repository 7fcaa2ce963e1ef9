"""docs/: how a page is reached, how long all pages are, and whether maps of files are whole."""

import ast
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest
from commands import run
from serving import DEMO, ROOT

from attnres_serve import cli
from tests.project.test_readme import links

DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
ARCHITECTURE = DOCS / "build" / "architecture.md"
PAGES = sorted(DOCS.rglob("*.md"))
# Pages that a program writes, and the words of all others.
WRITTEN = {
    "benchmarks/results/README.md",
    "docs/use/families.md",
    "docs/use/replaced.md",
    "tests/mutants/README.md",
}
MOST_WORDS = 45_000


def linked(path: Path) -> set[Path]:
    """Pages that a page links to, a folder's by its README."""
    names = (unquote(link).partition("#")[0] for link in links(path))
    found = {(path.parent / name).resolve() for name in names if not re.match(r"[a-z]+:", name)}
    return {target for target in found if target.suffix == ".md"}


def test_git_ignores_no_page() -> None:
    assert run("git", "check-ignore", "--no-index", *PAGES, status=1).stdout == ""  # 1: none is


def test_the_index_leads_to_every_page_and_opens_with_commands() -> None:
    assert len(COMMANDS) >= 6
    reached: set[Path] = set()
    left = {INDEX}
    while left:
        reached |= left
        left = {target for path in left for target in linked(path) if DOCS in target.parents}
        left -= reached
    assert set(PAGES) - reached == set()


COMMANDS = re.findall(r"^\| .*? \| `(.+?)` \| ", INDEX.read_text(), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_index_exist(command: str) -> None:
    words = shlex.split(command.replace("path/to/checkpoint", str(DEMO)))
    if words[0] == "make":
        run(*words, "CONTAINER=docker", "--dry-run")
    else:
        assert words[0] == "attnres-serve"
        cli.build_parser().parse_known_args(words[1:])  # exits if it knows no such command


def test_the_architecture_has_every_room_once() -> None:
    """In its picture and in its table."""
    text = ARCHITECTURE.read_text()
    rooms = {path.name for path in (ROOT / "attnres_serve").iterdir() if path.is_dir()}
    picture = re.search(r"```mermaid\n(flowchart .*?)```", text, re.S)
    assert picture
    boxes = re.findall(r'^ +(\w+)\["<b>(\w+)</b>', picture[1], re.M)
    assert len(boxes) == 15
    assert {name for pair in boxes for name in pair} == rooms - {"__pycache__"}
    table = text.partition("## Rooms")[2].partition("\n\nBeside")[0]
    rows = re.findall(r"^\| \[?`(\w+)/`", table, re.M)
    assert sorted(rows) == sorted(rooms - {"__pycache__"})


def test_the_pages_that_no_program_writes_stay_short() -> None:
    names = set(run("git", "ls-files", "*.md").stdout.split())
    assert names > WRITTEN
    words = {
        name: len((ROOT / name).read_text().split())
        for name in names - WRITTEN
        if (ROOT / name).is_file()
    }
    assert sum(words.values()) <= MOST_WORDS, sorted(words, key=words.__getitem__)[-20:]


def test_the_core_path_is_no_longer_than_its_page_states() -> None:
    _, _, section = ARCHITECTURE.read_text().partition("## The core path\n")
    stated = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", section)[:2]]
    block = section.partition("```text\n")[2].partition("```")[0]
    rooms = [line.split(": ") for line in block.splitlines()]
    files = [ROOT / room / f"{name}.py" for room, names in rooms for name in names.split()]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert len(set(files)) == stated[0]
    assert lines <= stated[1]


@pytest.mark.parametrize("room", ["compat", "checkpoints"])
def test_a_room_has_a_line_for_every_file(room: str) -> None:
    folder = ROOT / "attnres_serve" / room
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in folder.iterdir()
        if not path.name.startswith("_")
    }
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"\w+(?:\.py|/(?= |:|\.))", text)
    assert sorted(listed) == sorted(there)


def test_the_page_of_the_page_has_every_module() -> None:
    text = (DOCS / "build" / "change-the-page.md").read_text()
    table = text.partition("## Where a change goes")[2].partition("\n\n`page.css`")[0]
    static = ROOT / "server" / "static"
    assert sorted(re.findall(r"`(\w+\.js)`", table)) == sorted(
        path.name for path in static.glob("*.js")
    )
