"""README.md: within its limits, its commands run as they are written; and links of every page."""

import json
import re
import shlex
import sys
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import commands
import pytest
from markdown_it import MarkdownIt
from serving import DEMO, ROOT, Server

from attnres_serve.families import FAMILIES
from attnres_serve.server.routes import page
from attnres_serve.start.events import PHASES

README = ROOT / "README.md"
LISTED = commands.run("git", "ls-files", "-z", "*.md").stdout.split("\0")
PAGES = [ROOT / name for name in LISTED if name and (ROOT / name).is_file()]
MARKDOWN = MarkdownIt("commonmark").enable("table")


# Limits.


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 900


def test_the_readme_counts_the_decoders() -> None:
    stock = [family for family in FAMILIES.values() if family.is_stock]
    assert f"[{len(stock)} of vLLM's decoders]" in README.read_text()


def test_the_readme_has_its_parts_in_order():
    text = README.read_text()
    marks = (
        "docs/use/tutorial.md",
        "docs/images/page-figures.png",
        "arxiv.org/abs/2603.15031",
        "server/static/attnres.svg",
        "make serve",
        "/v1/completions",
        "pip install",
        "| format |",
        "## Speed",
        "attnres-serve check",
        "attnres-serve inspect",
        "attnres-serve bench",
        "make up",
        "## Documentation",
        "```bibtex",
    )
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text[: text.index("server/static/attnres.svg")].count("\n") <= 12  # above the fold
    assert links(README)[:2] == ["docs/use/tutorial.md", "docs/images/page-figures.png"]


def test_the_demos_figures_are_those_of_its_card():
    card = (DEMO / "README.md").read_text()
    readme = README.read_text()
    for row in (
        r"\*\*this model\*\* \| \*\*([\d.]+)\*\*",
        r"queries set to zero \| ([\d.]+)",
        r"same tokens \| ([\d.]+)",
    ):
        assert f"{float(re.search(row, card)[1]):.2f}" in readme


# Links.


def links(path: Path) -> list[str]:
    """Targets of the links and pictures of a page."""
    found = []
    for token in MARKDOWN.parse(path.read_text()):
        for child in token.children or ():
            found += [child.attrs[key] for key in ("href", "src") if key in child.attrs]
    return found


def anchors(path: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    tokens = MARKDOWN.parse(path.read_text())
    titles = [
        "".join(
            part.content for part in text.children or () if part.type in ("text", "code_inline")
        )
        for heading, text in pairwise(tokens)
        if heading.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(path: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    wrong = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = path.parent / name if name else path
        inside = target.resolve().is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path):
    assert broken(path) == []


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "# One `two`, three\n[x](b.md) [y](#one-two-three) [z](a.md#no)\n"
    )
    assert broken(tmp_path / "a.md") == ["b.md", "a.md#no"]


# The picture.


def test_the_picture_loads_nothing_and_has_colours_for_both_themes():
    drawn = (page.FOLDER / "attnres.svg").read_text()
    assert "prefers-color-scheme:dark" in drawn
    assert not re.search(r"<script|href=|url\((?!#)|@import", drawn)


# Commands.


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README.read_text(), re.M | re.S)


SHELL = blocks("bash")
LINES = "".join(SHELL).replace("\\\n", " ").splitlines()
COMMANDS = [words for line in LINES if (words := shlex.split(line, comments=True))]


def test_every_kind_of_command_is_run_by_a_test():
    """A command that is new in the README needs a test below."""
    first = {" ".join(command[:2]) for command in COMMANDS}
    assert first == {
        *("git clone", "cd attnres-serve", "make serve", "make up", "make down"),
        *("curl http://127.0.0.1:8000/v1/completions", "curl --retry", "pip install"),
        *(f"attnres-serve {name}" for name in ("serve", "check", "inspect", "bench")),
    }


@pytest.mark.parametrize("block", SHELL)
def test_blocks_are_shell(block):
    assert commands.run("bash", "-n", "-c", block).stderr == ""


def test_a_clone_serves(tmp_path):
    """The first block on a clone of this repository; what make would run is printed instead."""
    (block,) = (one for one in SHELL if "git clone" in one)
    assert block.count("make serve\n") == 1
    words = ("bash", "-ec", block.replace("make serve", "make --dry-run serve"))
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "URL": str(ROOT)}
    said = commands.run(*words, cwd=tmp_path, env=env).stdout
    assert "requirements/setup.sh serve" in said
    assert "bin/attnres-serve serve" in said and "--served-model-name demo" in said


@pytest.mark.parametrize(
    "command",
    [one for one in COMMANDS if one[0] == "make" and one != ["make", "serve"]],
    ids=" ".join,
)
def test_targets_of_make_exist(command):
    words = [*command, "CONTAINER=docker", "--dry-run"]
    words = [word.replace("path/to/checkpoint", str(DEMO)) for word in words]
    flags = dict(word.split("=", 1) for word in command if "=" in word)
    assert flags.get("ARGS", "") in commands.run(*words).stdout


def test_pip_installs_the_clone():
    """``test_release`` makes the wheel that this makes, and looks at what it requires."""
    assert [one for one in COMMANDS if one[0] == "pip"] == [["pip", "install", "."]]


def run(command: list[str], cwd: Path = ROOT) -> Any:
    """What a command of the README says, ``attnres-serve`` being that of this environment."""
    if command[0] == "attnres-serve":
        command = [sys.executable, "-m", "attnres_serve", *command[1:]]
    return commands.run(*command, cwd=cwd, timeout=900)


def command_of(name: str) -> list[str]:
    (command,) = (one for one in COMMANDS if one[:2] == ["attnres-serve", name])
    return command


def test_check_runs():
    assert "can be served" in run(command_of("check")).stdout


def test_bench_has_those_flags():
    """It takes minutes, and test_bench measures with the same flags."""
    said = run(["attnres-serve", "bench", "--help"]).stdout
    assert all(word in said for word in command_of("bench") if word.startswith("--"))
    assert (ROOT / command_of("bench")[2]).is_dir()


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.versions
def test_inspect_runs(tmp_path):
    """It names the file, says what begins, and nothing of libraries.

    A server that runs is asked by such a command in ``test_command``.
    """
    command = command_of("inspect")
    command[2] = str(ROOT / command[2])
    done = run(command, tmp_path)
    assert done.stdout == f"{command[-1]}\n"
    begun = [line.partition(" s  ")[2] for line in done.stderr.splitlines()]
    starts = [f"starting a server: {phase}" for phase in PHASES.values()]
    assert [one for one in begun if one not in starts] == ["asking the server", "writing"]
    assert begun[0] == starts[0]
    assert (tmp_path / command[-1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.engine
def test_what_the_readme_asks_is_answered(open_server: Server):
    for command in COMMANDS:
        if command[0] == "curl":
            run([word.replace("http://127.0.0.1:8000", open_server.url) for word in command])
    (completion,) = (one for one in COMMANDS if "/v1/completions" in one[1])
    asked = [word.replace("http://127.0.0.1:8000", open_server.url) for word in completion]
    assert json.loads(run([*asked, "-s"]).stdout)["choices"][0]["text"].strip()


def prompts() -> list[str]:
    """The one that curl asks with, and the two more."""
    (completion,) = (one for one in COMMANDS if "/v1/completions" in one[1])
    (more,) = blocks("text")
    asked = json.loads(completion[-1])
    assert not {"temperature", "top_p"} & set(asked)
    return [asked["prompt"], *map(json.loads, more.splitlines())]


def test_readme_page_and_card_have_the_same_three_prompts():
    assert len(prompts()) == 3
    written = unescape((page.FOLDER / page.INDEX).read_text())
    examples = re.findall(r'class="example" value="(.*?)">', written, re.S)
    card = (DEMO / "README.md").read_text().partition("## Samples")[2]
    samples = re.findall(r"^```python\n(.*?)^```", card, re.M | re.S)
    assert examples == prompts() and len(samples) == 3
    for sample, prompt in zip(samples, prompts(), strict=True):
        assert sample.startswith(prompt) and sample.count("import os") <= 1


@pytest.mark.engine
def test_the_three_prompts_work(open_server: Server):
    """With the demo's sampling, no answer has a line more than three times."""
    for prompt in prompts():
        for seed in range(3):
            body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "seed": seed}
            answer = open_server.client.post("/v1/completions", json=body).raise_for_status().json()
            lines = [line.strip() for line in answer["choices"][0]["text"].splitlines()]
            lines = [line for line in lines if line]
            assert lines and max(map(lines.count, lines)) <= 3, answer
