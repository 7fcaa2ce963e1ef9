"""``inspect --edit``: what is refused, asked and told."""

import re
import shlex
from pathlib import Path

import httpx
import pytest
from asked_server import asked_server
from inspecting import asking, inspect, refused
from serving import DEMO

from attnres_serve import cli
from attnres_serve.depth import edit_text
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.answer import TraceAnswer

PAGE = DEMO.parents[2] / "docs" / "use" / "inspect.md"
ASK = ("--prompt", "import os")
BLOCKS = AttnResSpec.uniform(Layout.of(3), 2, 1e-6)
NUMBER = r"-?\d+\.\d+"
# Two float32 evaluations, here and for the page: each logprob is off by 5e-4 at most
# (``trace_cases.LOGPROBS``), and a change has two of them.
ROUNDED = 4 * 5e-4


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ("", "'' cannot be read; expected mask,"),
        ("mask 'x", "cannot be read"),
        ("sites=3 mask", "'sites' stands where it cannot"),
        ("mask mean", "'mean' stands where it cannot"),
        ("mask sites=1 sites=2", "'sites' stands where it cannot"),
        ("mask places=3", "--edit: 'places' is no field; expected mask"),
        ("mask=no", "--edit: mask is 'no'; expected the word alone"),
        ("scale", "--edit: scale is ''; expected a number"),
        ("scale=1e9", "--edit: scale is '1e9'; expected a number"),
        ("weights=1,2", "--edit: weights is '1,2'; expected numbers from 0 to 1"),
        ("mask tokens=x", "--edit: tokens is 'x'; expected positions"),
        ("mask tokens=3:x", "--edit: tokens is '3:x'; expected positions from 0 on"),
    ],
)
def test_an_edit_that_is_none(edit, sentence, capsys):
    """Nothing was started for it."""
    assert sentence in refused(capsys, str(DEMO), *ASK, "--edit", edit)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mask", {"mask": True}),
        ("ban", {"mask": True}),
        (
            'mask sites=9,final,"mlp 3" sources="block 2",partial tokens=4:9',
            {
                "mask": True,
                "sites": [9, "final", "mlp 3"],
                "sources": ["block 2", "partial"],
                "tokens": {"start": 4, "end": 9},
            },
        ),
        ("mean tokens=:3", {"mean": True, "tokens": {"start": 0, "end": 3}}),
        ("force sources=embedding tokens=3,5", {"force": True, "tokens": [3, 5]}),
        ("weights=0.25,0.75 tokens=4:", {"weights": [0.25, 0.75], "tokens": {"start": 4}}),
        ("scale=-2.5", {"scale": -2.5}),
    ],
)
def test_an_edit_is_read(text, wanted):
    found = edit_text.read(text).model_dump(exclude_none=True)
    assert found | wanted == found
    assert {*found} - {*wanted} <= {"sources"}


def test_edits_are_sent_and_logprobs_printed(capsys, monkeypatch, tmp_path):
    """The lines are told again of the file that was written."""
    content = trace_answer.without_sites("demo", [5, 6], 2, [0, 1], ["a", "b"]) | {"sites": []}
    (site,) = [site for site in sites(BLOCKS) if site.index == 1]
    numbers = bytes(4 * 2 * site.num_sources)
    content["sites"] = [trace_answer.traced_site(site, numbers, numbers, 2)]
    content["edits"] = [{"scale": 2}]
    for name, first in (("unedited", -1.25), ("edited", -2.5)):
        rows = [
            {"position": at, "next": after, "top": [{"id": 7, "text": " x", "logprob": first}]}
            for at, after in ((0, first), (1, None))
        ]
        content["logprobs"] = (content["logprobs"] or {}) | {name: rows}
    asked = asked_server(monkeypatch)
    answer = TraceAnswer.model_validate(content)
    asked["answer"] = httpx.Response(200, content=answer.model_dump_json())
    path, told, token = tmp_path / "t.json", [], ["--token", "0"]
    edits = ("--edit", "mask sites=4 sources=embedding", "--edit", "scale=2")
    told.append(["--url", "http://x", *ASK, *edits, "--out", str(path)])
    told.append(["--from", str(path), "--out", str(path)])
    for words in told:
        assert cli.main(["inspect", *words]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "after token 1, 'b':",
            "  without edits  mean logprob -1.2500; next ' x' -1.2500",
            "  with edits     mean logprob -2.5000; next ' x' -2.5000",
            str(path),
        ]
    assert cli.main(["inspect", *told[0], *token]) == 0
    assert capsys.readouterr().out.startswith("after token 0, 'a':\n")
    assert asked["json"]["logprobs"] == 3
    assert asked["json"]["edits"] == [
        {"sites": [4], "sources": ["embedding"], "mask": True},
        {"scale": 2.0},
    ]


# The whole, as docs/use/inspect.md has it.


def run_of_the_page(capsys, command: str, folder: Path, url: str) -> tuple[str, Path]:
    """What a command of the page prints, and the file in `folder` that it writes."""
    *words, name = shlex.split(command.replace("\\\n", ""))
    return inspect(capsys, *asking(url, words[2:]), str(folder / name)), folder / name


def blocks(flag: str) -> tuple[str, str]:
    """The command of the page with a flag, and the block behind it."""
    found = re.findall(r"```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (at,) = [at for at, block in enumerate(found) if f"{flag} " in block]
    return found[at], found[at + 1]


@pytest.mark.engine
def test_an_edit_of_the_demo(open_server, tmp_path, capsys):
    command, told = blocks("--edit")
    printed, _ = run_of_the_page(capsys, command, tmp_path, open_server.url)
    lines = told.splitlines()
    found = printed.splitlines()[-len(lines) - 1 : -1]
    assert [re.sub(NUMBER, "0", line) for line in found] == [
        re.sub(NUMBER, "0", line) for line in lines
    ]
    numbers = [[float(x) for x in re.findall(NUMBER, "\n".join(text))] for text in (found, lines)]
    assert numbers[0] == pytest.approx(numbers[1], abs=ROUNDED)
