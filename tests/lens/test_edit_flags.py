"""``inspect --edit`` and ``inspect --importance``: what is refused, asked and told."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from inspecting import asking, inspect, refused
from serving import DEMO

from attnres_serve import cli
from attnres_serve.depth import edit_words
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, importance
from attnres_serve.lens.ask import Server
from attnres_serve.lens.importance import Importance
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.answer import TraceAnswer, TracedSite

PAGE = DEMO.parents[2] / "docs" / "use" / "inspect.md"
ASK = ("--prompt", "import os")
BLOCKS = AttnResSpec.uniform(Layout.of(3), 2, 1e-6)
TRACED = [
    TracedSite.model_validate(
        trace_answer.traced_site(site, *2 * [bytes(4 * 2 * site.num_sources)], 2)
    )
    for site in sites(BLOCKS)
    if site.mixes
]
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
    found = edit_words.read(text).model_dump(exclude_none=True)
    assert found | wanted == found
    assert {*found} - {*wanted} <= {"sources"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--importance", "m.txt"], "--importance is m.txt; expected FILE.json"),
        (["--importance", "nowhere/m.json"], "expected FILE.json in a folder that exists"),
        (["--importance", "m.json", "--from", "x.json"], "--from does not go with --importance"),
        (["--importance", "m.json", "--edit", "mask"], "--edit does not go with --importance"),
        (["--importance", "m.json", "--max-tokens", "2"], "--max-tokens does not go with"),
        (["--importance", "m.json", "--token", "2"], "--token does not go with --importance"),
        (["--importance", "m.json", "--out", "x.png"], "--out does not go with --importance"),
        (["--importance", "m.json"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--importance", "m.json", "--uds", "x"], "--uds is for a server that others"),
        (["--url", "http://127.0.0.1:1", "--importance", "m.json"], "cannot be asked"),
    ],
)
def test_a_map_that_is_refused(words, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words, *ASK)
    assert not any(tmp_path.iterdir())


def test_a_text_of_one_token_has_no_map(capsys, monkeypatch, tmp_path):
    text = TraceAnswer.model_validate(trace_answer.head("demo", [5], 1, [0], ["a"]) | {"sites": []})
    answer = httpx.Response(200, content=text.model_dump_json())
    monkeypatch.setattr(httpx, "post", lambda url, **_: answer)
    words = ("--url", "http://x", "--prompt", "a", "--importance", str(tmp_path / "m.json"))
    assert "the text has one token" in refused(capsys, *words)


def test_a_server_is_asked_for_edits_and_tells_logprobs(capsys, monkeypatch, tmp_path):
    """The lines are told again of the file that was written."""
    content = trace_answer.head("demo", [5, 6], 2, [0, 1], ["a", "b"]) | {"sites": []}
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
    asked = {}

    def post(url: str, **words) -> httpx.Response:
        asked.update(words["json"])
        return httpx.Response(200, content=TraceAnswer.model_validate(content).model_dump_json())

    monkeypatch.setattr(httpx, "post", post)
    path, told, token = tmp_path / "t.json", [], ["--token", "0"]
    edits = ("--edit", "mask sites=4 sources=embedding", "--edit", "scale=2")
    told.append(["--url", "http://x", *ASK, *edits, "--out", str(path)])
    told.append(["--from", str(path), "--out", str(path)])
    for words in told:
        assert cli.main(["inspect", *words]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "behind token 1, 'b':",
            "  without edits  mean logprob -1.2500; next ' x' -1.2500",
            "  with edits     mean logprob -2.5000; next ' x' -2.5000",
            str(path),
        ]
    assert cli.main(["inspect", *told[0], *token]) == 0
    assert capsys.readouterr().out.startswith("behind token 0, 'a':\n")
    assert asked["logprobs"] == 3
    assert asked["edits"] == [
        {"sites": [4], "sources": ["embedding"], "mask": True},
        {"scale": 2.0},
    ]


# Maps.


class Meter:
    """A server's answers, with logprobs that are made up; `left` are given, then it is gone.

    Attributes:
        asked: the site and source of every mask that was measured; None where there was none.
    """

    def __init__(self, left: int = 99) -> None:
        self.left = left
        self.asked: list[tuple[int, str] | None] = []

    def __call__(self, _: Server, body: dict) -> TraceAnswer:
        head = trace_answer.head("demo", [3, 4], 2, [0, 1], ["a", "b"]) | {"sites": []}
        if "logprobs" not in body:
            traced = TRACED if "tokens" in body else []
            return TraceAnswer.model_validate(
                head | {"sites": [one.model_dump() for one in traced]}
            )
        if not self.left:
            raise SettingError("the server is gone.")
        self.left -= 1
        masks = [(edit["sites"][0], edit["sources"][0]) for edit in body.get("edits", ())]
        mask = masks[0] if masks else None
        self.asked.append(mask)
        rows = [{"position": 0, "next": -1.0 + change_of(mask), "top": []}]
        rows.append({"position": 1, "next": None, "top": []})
        head["logprobs"] = {"unedited": rows, "edited": None}
        return TraceAnswer.model_validate(head)


def change_of(mask: tuple[int, str] | None) -> float:
    """Of the mean logprob; no two masks have one."""
    if mask is None:
        return 0.0
    site, source = mask
    return float(-1 - site - 100 * sites(BLOCKS)[site].sources.index(source))


@pytest.mark.parametrize("left", [99, 3, 1, 0])
def test_a_map_has_what_was_measured(left, monkeypatch, tmp_path):
    """Wherever it ends: every source that a site can do without is masked once, in order."""
    path, meter = tmp_path / "map.json", Meter(left)
    monkeypatch.setattr(ask, "post", meter)
    with nullcontext() if left == 99 else pytest.raises(SettingError, match="is gone"):
        importance.write_map(Server("http://x"), "ab", path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] * (left > 0)
    if not left:
        return
    found = Importance.model_validate_json(path.read_text())
    assert (found.model, found.tokens, found.logprob) == ("demo", [3, 4], -1.0)
    masks = [
        (one.index, source) for one in found.sites for source in one.sources[1:] and one.sources
    ]
    assert [None, *masks][: len(meter.asked)] == meter.asked
    told = dict.fromkeys(meter.asked)
    for site in found.sites:
        each = [(site.index, source) for source in site.sources]
        assert site.change == [change_of(mask) if mask in told else None for mask in each]


@pytest.mark.parametrize("content", ["", "{}", '{"model": "demo"'])
def test_a_file_is_not_written_over(content, capsys, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(content)
    sentence = refused(capsys, "--url", "http://x", "--importance", str(path), *ASK)
    assert sentence.endswith(f"--importance: {path} exists already; name a new file, or remove it.")
    assert path.read_text() == content


def test_a_map_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(ask, "post", Meter())
    with pytest.raises(SettingError, match="cannot be written"):
        importance.write_map(Server("http://x"), "ab", tmp_path / "nowhere" / "map.json")


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


@pytest.mark.engine
def test_an_importance_map_of_the_demo(open_server, tmp_path, capsys):
    command, told = blocks("--importance")
    printed, path = run_of_the_page(capsys, command, tmp_path, open_server.url)
    assert printed.splitlines()[-1] == str(path)
    found, said = Importance.model_validate_json(path.read_text()), json.loads(told)
    assert said["logprob"] == pytest.approx(found.logprob, abs=ROUNDED)
    every = {one.index: one for one in found.sites}
    for site in said["sites"]:
        own = every[site["index"]]
        assert site == own.model_dump() | {"change": pytest.approx(own.change, abs=ROUNDED)}
