"""``attnres-serve inspect``: figures of made-up traces, refusals, and traces of a server."""

import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from asked_server import asked_server
from checkpoints import write_standard
from inspecting import asking, inspect, refused
from made_up import made_up
from matplotlib.figure import Figure
from serving import DEMO

from attnres_serve import cli
from attnres_serve.lens import depth_map, figure, pictures, temporary_server
from attnres_serve.lens.ask import Server
from attnres_serve.tracing.answer import TraceAnswer


def heat_map(drawn: Figure, panel: int) -> np.ma.MaskedArray:
    (image,) = drawn.axes[panel].images
    return image.get_array()


SHAPES = {
    "block": (made_up(8, 4), 17, 5),
    "full": (made_up(48, 1), 97, 97),
    "two sources": (made_up(4, 8), 9, 2),
    "deep": (made_up(100, 2), 201, 101),
    "cumulative": (made_up(6, 3, cumulative=True, final_mix=False), 12, 5),
}


def drawn(trace: TraceAnswer, token: int = 0, width: float = figure.WIDTH) -> Figure:
    return depth_map.draw(trace, token, width)


@pytest.mark.parametrize("shape", SHAPES)
def test_heat_maps(shape):
    """Every weight of the token and of the mean in its place, and nothing where no source is."""
    trace, count, sources = SHAPES[shape]
    found = drawn(trace, 4)
    for panel, wanted in (
        (0, lambda weights: weights[4]),
        (1, lambda weights: weights.mean(axis=0)),
    ):
        table = heat_map(found, panel)
        assert table.shape == (count, sources)
        for row, site in zip(table, trace.sites, strict=True):
            own = len(site.sources)
            np.testing.assert_allclose(row[:own], wanted(np.array(site.weights)))
            assert np.ma.getmaskarray(np.ma.masked_invalid(row))[own:].all()
        assert np.ma.masked_invalid(table).count() < table.size


@pytest.mark.parametrize("width", [3.25, figure.WIDTH])
@pytest.mark.parametrize("shape", SHAPES)
def test_labels_are_few_and_right(shape, width):
    """Layers beside their rows, sources below their columns, and a colour for the kind of site."""
    trace, count, sources = SHAPES[shape]
    axes, *_, bar = drawn(trace, width=width).axes
    ticks = dict(
        zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True)
    )
    if trace.sites[-1].kind == "final":
        assert ticks.pop("final") == count - 1
    assert 4 <= len(ticks) <= figure.MOST_LAYERS + 1
    assert all(at == 2 * int(layer) + 0.5 for layer, at in ticks.items())
    names = [text.get_text() for text in axes.get_xticklabels()]
    is_full = sources >= count - 1  # a column is a sublayer, of which a layer has two
    columns = [2 * int(name) + 1 if is_full else int(name) for name in names[1:]]
    assert names[0] == "emb" and list(axes.get_xticks()) == [0, *columns]
    assert 2 <= len(names) <= (13 if width > figure.NARROW else 7) and int(names[-1]) < sources
    strip = [bar.get_facecolor()[:3] for bar in axes.containers[0]]
    assert len(strip) == count
    assert len(set(strip)) == len({site.kind for site in trace.sites})
    assert strip[0] == strip[2] != strip[1] == strip[3]
    assert axes.get_ylabel() == "layer"
    assert axes.get_xlabel() == f"source, by {'layer' if is_full else 'block'}"
    root = "square" if sources <= figure.FEW_SOURCES else "cube"
    assert bar.get_ylabel() == f"weight, of 1 ({root}-root scale)"


def test_blocks_are_marked():
    """A frame is around every partial sum; there is none for single sublayers."""
    frames = drawn(SHAPES["block"][0]).axes[0].patches[-4:]  # the strip's bars come first
    assert [frame.get_bbox().bounds for frame in frames] == [
        (0.5, 0.5, 1, 3),  # site 0 reads the embedding alone
        (1.5, 4.5, 1, 3),
        (2.5, 8.5, 1, 3),
        (3.5, 12.5, 1, 4),
    ]
    assert len(drawn(SHAPES["full"][0]).axes[0].patches) == 97


def test_titles():
    """The model by its name, and the token by its text as Python writes it."""
    trace = made_up(8, 4)
    found = drawn(trace, 4)
    assert found.get_suptitle() == "demo: attention over depth"
    assert found.axes[0].get_title() == "token 4: ' $x$'"
    assert not found.axes[0].title.get_parse_math()
    assert found.axes[1].get_title() == "mean over 8 tokens"
    assert drawn(trace, 2).axes[0].get_title() == r"token 2: '\n'"
    assert drawn(trace, 6).axes[0].get_title() == r"token 6: '\u4f60'"  # which the font lacks
    assert drawn(trace, 7).axes[0].get_title() == "token 7: 'é'"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a missing glyph
        drawn(trace, 6).savefig(io.BytesIO())
    trace.tokens[5].text, trace.tokens[6].text = None, 30 * "a"
    assert drawn(trace, 5).axes[0].get_title() == "token 5, id 105"
    assert drawn(trace, 6).axes[0].get_title() == f"token 6: '{23 * 'a'}…'"


# What is refused.


ASK = ("--prompt", "import os")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*ASK], "give a checkpoint right after `inspect`, --url"),
        ([str(DEMO), *ASK, "--url", "http://127.0.0.1:1"], "one of them"),
        ([str(DEMO)], "give the prompt by --prompt TEXT or --prompt-file FILE"),
        ([str(DEMO), *ASK, "--prompt-file", "x"], "or --prompt-file FILE, one of them"),
        ([str(DEMO), "--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        ([str(DEMO), "--from", "x.json"], "one of them"),
        (["--from", "x.json"], "x.json cannot be read"),
        (["--from", "x.json", *ASK], "--prompt is for a new trace"),
        (["--from", "x.json", "--dtype", "half"], "--dtype is for a new trace"),
        ([str(DEMO), "--prompt", ""], "--prompt is empty"),
        ([str(DEMO), *ASK, "--token", "-1"], "--token is -1; expected 0 or more"),
        ([str(DEMO), *ASK, "--max-tokens", "-1"], "--max-tokens is -1; expected 0 or more"),
        ([str(DEMO), *ASK, "--lens", "2"], "--lens has its place in a .json file; --out is insp"),
        (["--from", "x.json", "--lens", "2"], "--lens is for a new trace"),
        (
            [str(DEMO), *ASK, "--width", "3.25", "--out", "x.json"],
            "--width is 3.25; expected 2 to 40",
        ),
        ([str(DEMO), *ASK, "--width", "nan"], "--width is nan; expected 2 to 40 inches"),
        ([str(DEMO), *ASK, "--out", "x.gif"], "x.gif; expected a name that ends with one of .png"),
        ([str(DEMO), *ASK, "--out", "x"], "--out is x; expected"),
        ([str(DEMO), *ASK, "--out", "nowhere/at/all.png"], "nowhere/at is not a folder"),
        ([str(DEMO), *ASK, "--out", "x.json", "--token", "0"], "a .json file has every token"),
        ([str(DEMO), *ASK, "--max-model-len", "2048"], "has a context of 1024 tokens"),
        (["no/such/folder", *ASK], "no/such/folder does not exist"),
        ([str(DEMO), *ASK, "--model", "other"], "found --model beside the checkpoint"),
        (["--url", "http://127.0.0.1:1", *ASK, "--dtype", "half"], "--dtype is for a server"),
        (["--url", "http://127.0.0.1:1", *ASK, "--max-model-len", "9"], "--max-model-len is for"),
        (["--url", "nonsense", *ASK], "the server nonsense cannot be asked"),
        (["", *ASK], "the checkpoint is empty; give it a value"),
        *(
            ([str(DEMO), *ASK, flag, ""], f"{flag} is empty; give it a value, or leave it out")
            for flag in ("--from", "--importance", "--out")
        ),
        ([str(DEMO), *ASK, "--max-model-len", "0"], "--max-model-len is 0; expected 1 or more"),
        (["--from", "x.json", "--max-model-len", "0"], "--max-model-len is 0"),
        ([str(DEMO), "--prompt", "caf\udce9"], "the prompt in --prompt is not in UTF-8"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, *words)


@pytest.fixture
def no_server(monkeypatch):
    """What is refused is refused before a server starts."""

    def started(*_):
        pytest.fail("a server was started")

    monkeypatch.setattr(temporary_server, "running", started)


TO_JSON = ("--out", "x.json")
EDIT = ("--edit", "scale=2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*EDIT, "--max-tokens", "65"], "--max-tokens is 65; with --edit expected at most 64"),
        ([*EDIT * 65], "--edit is given 65 times; expected at most 64"),
        (["--max-num-seqz", "5"], "found --max-num-seqz, which is no flag; did you mean --max-n"),
        (["--max-token", "5"], "found --max-token, which is no flag; did you mean --max-tokens"),
        (["--config", "dtype: half a byte"], "flags.yaml, line 1: found --dtype half a byte; exp"),
        (["--config", "max_sequences: 0"], "flags.yaml, line 1: found --max-sequences 0; expected"),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_mistakes_start_no_server(words, sentence, capsys, monkeypatch, tmp_path):
    """Flags of a file count as well."""
    monkeypatch.chdir(tmp_path)
    if "--config" in words:
        Path("flags.yaml").write_text(words[-1])
        words = [*words[:-1], "flags.yaml"]
    assert sentence in refused(capsys, str(DEMO), *ASK, *TO_JSON, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--dtype=half", "--attnres-backend", "torch"],
        ["--max-model-len", "64", "--max-trace-tokens=9", "--additional-config", "{}"],
    ],
)
def test_a_temporary_server_gets_the_other_flags(words, server, monkeypatch, tmp_path):
    started = []

    @contextmanager
    def running(checkpoint, flags, verbose, show):
        started.extend([checkpoint, *flags])
        yield Server("http://127.0.0.1:9", "its key", is_temporary=True)

    monkeypatch.setattr(temporary_server, "running", running)
    server["answer"] = httpx.Response(200, content=made_up(3, 2).model_dump_json())
    out = str(tmp_path / "x.json")
    assert cli.main(["inspect", str(DEMO), *ASK, "--out", out, *words]) == 0
    longest = ["--max-model-len=64"] if "--max-model-len" in words else []
    wanted = words[2:] if longest else words
    assert started == [str(DEMO), *wanted, *longest]
    assert server["headers"] == {"Authorization": "Bearer its key"}


@pytest.mark.parametrize(
    ("content", "prompt"),
    [("über\n".encode(), "über\n"), (b"\xef\xbb\xbfimport os\r\n", "import os\r\n")],
    ids=["umlaut", "mark"],
)
@pytest.mark.parametrize(
    "words", ["--prompt -", "--prompt-file -", "--prompt-file p", "--prompt TEXT"]
)
def test_a_prompt_of_a_file_or_of_stdin(words, content, prompt, server, tmp_path, monkeypatch):
    """A byte order mark is no part of it; line breaks of another system are."""
    monkeypatch.chdir(tmp_path)
    Path("p").write_bytes(content)
    with open("p") as file:
        monkeypatch.setattr("sys.stdin", file)
        server["answer"] = httpx.Response(200, content=made_up(3, 2).model_dump_json())
        given = [word if word != "TEXT" else content.decode() for word in words.split()]
        assert cli.main(["inspect", "--url", "http://x", *given, "--out", "x.json"]) == 0
    assert server["json"]["prompt"] == prompt


NO_PROMPTS = {
    "is empty": [b"", b"\xef\xbb\xbf"],
    "is not in UTF-8": [b"\xff", "für".encode("latin-1"), "a".encode("utf-16")],
    "has NUL characters": ["import os".encode("utf-16-le"), "import os".encode("utf-32-be")],
}


@pytest.mark.parametrize(
    ("content", "said"), [(content, said) for said in NO_PROMPTS for content in NO_PROMPTS[said]]
)
def test_a_prompt_that_is_none(content, said, tmp_path, capsys):
    (tmp_path / "p").write_bytes(content)
    assert said in refused(capsys, str(DEMO), "--prompt-file", str(tmp_path / "p"))


def test_a_trace_is_drawn_again(tmp_path, capsys):
    """To the byte what the first drawing was, and a token of those that are in it."""
    trace, saved = made_up(3, 2), tmp_path / "trace.json"
    saved.write_text(trace.model_dump_json())
    last = trace.tokens[-1].position
    depth_map.write(trace, last, tmp_path / "first.png")
    again = tmp_path / "again.png"
    assert cli.main(["inspect", "--from", str(saved), "--out", str(again)]) == 0
    assert capsys.readouterr().out == f"{again}\n"
    assert again.read_bytes() == (tmp_path / "first.png").read_bytes()
    content = json.loads(saved.read_text())
    content["tokens"] = content["tokens"][2:4]  # as a server traces when it is asked for some
    for site in content["sites"]:
        for name in ("weights", "rms", "entropy"):
            site[name] = site[name][2:4]
    saved.write_text(json.dumps(content))
    assert cli.main(["inspect", "--from", str(saved), "--out", str(again)]) == 0
    capsys.readouterr()
    words = ("--from", str(saved), "--out", str(again), "--token", "0")
    assert "expected one of the 2 tokens that are traced" in refused(capsys, *words)


def test_a_width_for_a_column(tmp_path):
    """Text stays text in SVG and PDF, and the same trace gives the same bytes."""
    trace, width = SHAPES["block"][0], 3.25
    for name in ("a.svg", "b.svg", "a.pdf", "b.pdf"):
        depth_map.write(trace, 1, tmp_path / name, width)
    for suffix in ("svg", "pdf"):
        texts = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab"]
        assert texts[0] == texts[1]
    drawn = (tmp_path / "a.svg").read_text()
    assert f'width="{72 * width:g}pt"' in drawn
    assert all(f">{text}</text>" in drawn for text in ("mean over 8 tokens", "layer", "attention"))
    assert b"/Subtype /Type3" not in (tmp_path / "a.pdf").read_bytes()
    assert f"/MediaBox [ 0 0 {72 * width:g} ".encode() in (tmp_path / "a.pdf").read_bytes()


@pytest.mark.parametrize("chosen", [[0, 2], [1, 2]])
def test_a_figure_is_of_all_sites(chosen, tmp_path, capsys):
    """A column is a block, which rows in between that are missing would not tell apart."""
    trace, saved = made_up(3, 2), tmp_path / "trace.json"
    trace.sites = [trace.sites[index] for index in chosen]
    saved.write_text(trace.model_dump_json())
    words = ["--from", str(saved), "--out"]
    for name in ("x.png", "x.svg"):
        said = refused(capsys, *words, str(tmp_path / name))
        assert f"has the sites {chosen[0]}, 2, and a figure needs all of them from 0 on" in said
        assert not (tmp_path / name).exists()
    assert cli.main(["inspect", *words, str(tmp_path / "x.html")]) == 0


def test_modes_without_an_engine_import_none(tmp_path):
    """Nor what engines are made of; torch reads the queries of a checkpoint."""
    (tmp_path / "trace.json").write_text(made_up(3, 2).model_dump_json())
    script = f"""
import sys
from attnres_serve import cli
def imported(*words):
    assert cli.main(["inspect", *words]) == 0
    return {{"torch", "vllm", "transformers"}} & set(sys.modules)
assert not imported("--from", "trace.json", "--out", "x.svg")
assert imported({str(DEMO)!r}, "--queries", "--out", "x.csv") <= {{"torch"}}
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "x.svg").is_file() and (tmp_path / "x.csv").is_file()


@pytest.mark.parametrize("part", ["tokens", "sites"])
def test_a_file_of_nothing(part, tmp_path, capsys):
    content = made_up(3, 2).model_dump()
    for name in {part, "sites"}:
        content[name] = []
    (tmp_path / "x.json").write_text(json.dumps(content))
    said = refused(capsys, "--from", str(tmp_path / "x.json"), "--out", "y.json")
    assert "there is nothing to draw" in said


def test_a_model_of_another_kind(tmp_path, capsys):
    plain = write_standard(tmp_path / "plain")
    assert "is not an AttnRes checkpoint" in refused(capsys, str(plain), *ASK)


def test_only_a_figure_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    assert "--out x.svg needs matplotlib" in refused(capsys, str(DEMO), *ASK, "--out", "x.svg")
    said = refused(capsys, "no/such/folder", *ASK, "--out", "x.json")
    assert "matplotlib" not in said


# A server is asked.


@pytest.fixture
def server(monkeypatch):
    """Set what the next answer is; what was asked is kept."""
    return asked_server(monkeypatch)


URL = ("--url", "http://127.0.0.1:8000/", *ASK)


@pytest.mark.parametrize("key", [None, "a-key"])
def test_a_request_to_a_server(key, server, monkeypatch, tmp_path, capsys):
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    wanted = made_up(3, 2)
    server["answer"] = httpx.Response(200, content=wanted.model_dump_json())
    out = tmp_path / "found.json"
    words = ["--max-tokens", "3", "--lens", "2", "--out", str(out)]
    assert cli.main(["inspect", *URL, *words]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert TraceAnswer.model_validate_json(out.read_text()) == wanted
    assert server["url"] == "http://127.0.0.1:8000/v1/attn_res/trace"
    assert server["json"] == {"prompt": "import os", "max_tokens": 3, "lens": 2}
    assert server["headers"] == ({"Authorization": f"Bearer {key}"} if key else {})


# The whole.


@pytest.mark.engine
def test_the_figure_of_the_documentation(open_server, tmp_path, capsys):
    """Its command, word for word but for the name of the file, of a server that runs already."""
    page = (DEMO.parents[2] / "docs" / "use" / "inspect.md").read_text()
    command, *_ = re.findall(r"```bash\nattnres-serve (inspect .*?)```", page, re.DOTALL)
    *words, committed = shlex.split(command.replace("\\\n", ""))
    out = tmp_path / "demo.png"
    inspect(capsys, *asking(open_server.url, words[1:]), str(out))
    for path in (out, DEMO.parents[2] / committed):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 200_000
