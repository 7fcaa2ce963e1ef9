"""``attnres_serve.Trace``: its dataset, files, and what a notebook shows."""

import base64
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xarray
from made_up import TEXTS, made_up
from serving import ROOT

import attnres_serve
from attnres_serve.depth.edits import Edit
from attnres_serve.errors import SettingError
from attnres_serve.lens import depth_map
from attnres_serve.lens.traced import Trace
from attnres_serve.tracing import answer
from attnres_serve.tracing.readings import WHOLE
from tests.lens.test_command import SHAPES

TOKENS = len(TEXTS)
WORDS = ("a", " b", "c\0", "\n", "你", '"<&')  # NumPy's own strings lose a NUL at their end
ROUNDED = 1e-5  # up to a hundred weights, of float32 and with six digits


def predictions(draw: random.Random, top: int) -> list[dict]:
    return [
        {
            "position": at,
            "next": -draw.random() if at + 1 < TOKENS else None,
            "top": [
                {"id": draw.randrange(999), "text": draw.choice(WORDS), "logprob": -draw.random()}
                for _ in range(top)
            ],
        }
        for at in range(TOKENS)
    ]


def everything(*shape: int, edited: bool = True) -> answer.TraceAnswer:
    """A made-up trace with logprobs and a lens of two mixes, a block and a partial sum."""
    draw, content = random.Random(0), made_up(*shape).model_dump()
    content["tokens"][2]["text"] = "c\0"
    content["logprobs"] = {"unedited": predictions(draw, 3)}
    if edited:
        content["logprobs"]["edited"] = predictions(draw, 3)
        content["edits"] = [{"sites": [1, "final"], "sources": ["embedding"], "mask": True}]
    vectors = [(0, WHOLE), (1, WHOLE), (None, "block 1"), (1, "partial")]
    content["lens"] = [
        {"site": site, "vector": vector, "predictions": predictions(draw, 2)}
        for site, vector in vectors
    ]
    return answer.TraceAnswer.model_validate(content)


@pytest.fixture(scope="module")
def whole() -> Trace:
    return Trace(everything(3, 2))


# Variables and coordinates.


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_in_its_place(shape):
    """Under its site, token and source; nothing else is there, and weights sum to 1."""
    found, _, sources = SHAPES[shape]
    trace, rows = Trace(found), range(TOKENS)
    names = trace["source"].values.tolist()
    assert names[0] == "embedding" and names[-1] == "partial" and len({*names}) == len(names)
    blocks = [name for name in names if name.startswith("block")]
    assert names[1:-1] == blocks == [f"block {number + 1}" for number in range(len(blocks))]
    assert sources <= len(names) <= sources + 1  # the last block is nowhere beside its sum
    for name in ("weights", "rms"):
        assert trace[name].shape == (len(found.sites), TOKENS, len(names))
        for site, table in zip(found.sites, trace[name].values, strict=True):
            for row in rows:
                own = zip(names, table[row].tolist(), strict=True)
                there = {source: number for source, number in own if number == number}
                assert there == dict(zip(site.sources, getattr(site, name)[row], strict=True))
    np.testing.assert_allclose(np.nansum(trace["weights"], axis=-1), 1, atol=ROUNDED)
    assert trace["entropy"].values.tolist() == [site.entropy for site in found.sites]
    assert [*trace.data] == ["weights", "rms", "entropy"]


@pytest.mark.parametrize("edited", [True, False])
def test_predictions_of_next_tokens(edited):
    """Logprobs with edits and without."""
    found = everything(3, 2, edited=edited)
    trace, both = Trace(found), found.logprobs
    check_predictions(trace.data, "", both.edited if edited else both.unedited)
    assert ("unedited_next" in trace.data) == edited
    if edited:
        check_predictions(trace.data, "unedited_", both.unedited)
    ranks = [trace[name].values.tolist() for name in ("rank", "lens_rank")]
    assert ranks == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (4, 3)])
def test_a_lens_is_by_site_and_source(shape):
    """A block is at every site that reads it, and blank is what was not read."""
    found = everything(*shape)
    data = Trace(found).data
    assert data["lens_next"].dims == data["weights"].dims == ("site", "token", "source")
    assert data["lens_top_text"].dims == ("site", "token", "source", "lens_rank")
    assert data["lens_mix_top_logprob"].dims == ("site", "token", "lens_rank")
    read = {(reading.site, reading.vector): reading.predictions for reading in found.lens}
    blank = [answer.Prediction(position=0, next=None, top=[]) for _ in range(TOKENS)]
    seen = set()
    for site in found.sites:
        for source in data["source"].values:
            key = (site.index if source == "partial" else None, source)
            rows = read.get(key) if source in site.sources else None
            seen |= {key} if rows else set()
            of_source = data.sel(site=site.index, source=source)
            check_predictions(of_source, "lens_", rows or blank)
        rows = read.get((site.index, WHOLE))
        seen |= {(site.index, WHOLE)} if rows else set()
        check_predictions(data.sel(site=site.index), "lens_mix_", rows or blank)
    assert seen == {key for key in read if key != (1, "partial") or shape[1] > 1}


def check_predictions(data: xarray.Dataset, prefix: str, rows: list) -> None:
    """The arrays of a prefix have the rows; a row without tokens is blank."""
    following = [None if np.isnan(x) else x for x in data[f"{prefix}next"].values.tolist()]
    assert following == [row.next for row in rows]
    for name, none in (("id", -1), ("text", ""), ("logprob", None)):
        values = data[f"{prefix}top_{name}"].values
        wanted = [[getattr(token, name) for token in row.top] or [none] * 2 for row in rows]
        values = np.where(values != values, None, values)  # NaN is no number
        assert values.tolist() == wanted


def test_coordinates_name_sites_and_tokens(whole):
    sites, tokens = whole.answer.sites, whole.answer.tokens
    assert whole["site"].values.tolist() == [site.index for site in sites]
    assert whole["token"].values.tolist() == [token.position for token in tokens]
    assert whole["kind"].values.tolist() == [site.kind for site in sites]
    layers = [site.layer for site in sites]
    assert layers[-1] is None and whole["layer"].values.tolist() == [*layers[:-1], -1]
    assert whole["token_id"].values.tolist() == [token.id for token in tokens]
    assert whole["token_text"].values.tolist() == [token.text for token in tokens]
    assert repr(whole).startswith("trace of folder/demo: 7 sites, 8 tokens, edited\n<xarray.Dat")
    assert whole.data.attrs["model"] == "folder/demo" and whole.data.attrs["total_tokens"] == TOKENS
    (edit,) = json.loads(whole.data.attrs["edits"])
    assert Edit.model_validate(edit) == whole.answer.edits[0]


@pytest.mark.parametrize("part", ["sites", "tokens"])
def test_a_trace_of_nothing(part):
    """As a server answers where no site or token is asked for."""
    content = made_up(2, 2).model_dump()
    content[part] = []
    for site in content["sites"]:
        site["weights"], site["rms"], site["entropy"] = [], [], []
    trace = Trace(answer.TraceAnswer.model_validate(content))
    assert trace["weights"].size == trace["entropy"].size == 0
    assert trace._repr_html_() is None and trace.data.sizes["site"] == len(content["sites"])


# What xarray does with it.


def test_arithmetic_is_of_numbers_alone(whole):
    """Of the variables that both have; texts and ids are coordinates, also of other tokens."""
    content = everything(3, 2, edited=False).model_dump() | {"model": "other", "lens": None}
    for site in content["sites"]:
        site["weights"] = [row[::-1] for row in site["weights"]]
    other = Trace(answer.TraceAnswer.model_validate(content))
    change = whole.data - other.data
    assert {*change} == {"weights", "rms", "entropy", "next", "top_logprob"}
    for name in change:
        wanted = whole[name].values - other[name].values
        np.testing.assert_array_equal(change[name].values, wanted)
    assert float(abs(change["weights"]).max()) > 0.1 and not float(abs(change["rms"]).max())
    assert "token_text" in change.coords
    nothing = whole.data - whole.data
    assert {*nothing} == {*whole.data} and not float(abs(nothing).to_array().max())


def test_netcdf(whole, tmp_path):
    path = tmp_path / "x.nc"
    whole.data.to_netcdf(path)
    with xarray.open_dataset(path) as again:
        for name in whole.data:
            np.testing.assert_array_equal(again[name].values, whole[name].values)
        assert again.attrs["model"] == "folder/demo"


# Files.


def save_arrays(path: Path, trace: Trace) -> None:
    """Write a file of arrays with the answer beside them, as earlier versions did."""
    content = (trace.answer.model_dump_json() + "\n").encode()
    arrays = {name: trace[name].values for name in ("weights", "rms", "entropy")}
    np.savez_compressed(path, answer=np.frombuffer(content, np.uint8), **arrays)


@pytest.mark.parametrize("name", ["x.json", "X.JSON", "x.npz"])
def test_a_file_holds_all_of_a_trace(name, whole, tmp_path):
    path = tmp_path / name
    save_arrays(path, whole) if name == "x.npz" else whole.save(path)
    again = Trace.load(str(path))
    assert again.answer == whole.answer and again.data.identical(whole.data)
    assert [path] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["x.csv", "x", "json", "x.npz"])
def test_a_name_of_another_kind(name, whole, tmp_path):
    with pytest.raises(SettingError, match=rf"{name}: expected a name that ends with \.json; "):
        whole.save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written(whole, tmp_path):
    with pytest.raises(SettingError, match=r"nowhere/x\.json cannot be written"):
        whole.save(tmp_path / "nowhere" / "x.json")


def broken(content: dict, *keys: str | int) -> bytes:
    """The JSON of a trace without one of its numbers, which the last key names."""
    place = content
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("model",), "is no trace; give a file that"),
        (("sites", 1, "rms", 2, 0), "the numbers of site 1 do not fit its 2 sources and the 8"),
        (("sites", 1, "entropy", 2), "the numbers of site 1 do not fit"),
        (("tokens", 0), "the numbers of site 0 do not fit its 1 sources and the 7 tokens"),
        (("logprobs", "edited", 3), "the numbers of `logprobs` do not fit the 8 tokens"),
        (("logprobs", "unedited", 3, "top", 0), "the numbers of `logprobs` do not fit"),
        (("lens", 2, "predictions", 3), "the numbers of `lens` do not fit the 8 tokens"),
        (("lens", 2, "predictions", 3, "top", 0), "the numbers of `lens` do not fit"),
    ],
)
def test_a_file_whose_numbers_do_not_fit(keys, sentence, whole, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(broken(whole.answer.model_dump(), *keys))
    with pytest.raises(SettingError, match=sentence):
        Trace.load(path)


def test_a_file_that_is_no_trace(whole, tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(SettingError, match=r"x\.npz cannot be read"):
        Trace.load(path)
    np.savez(path, weights=whole["weights"].values)
    others = [b"", b"{}", b"PK", b"\xff\xfe", path.read_bytes()]
    save_arrays(path, whole)
    saved = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (place,) = [item.header_offset for item in archive.infolist() if "answer" in item.filename]
    damaged = bytearray(saved)
    damaged[place + 99] ^= 0xFF
    for content in (*others, saved[: len(saved) // 2], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(SettingError, match=r"x\.npz is no trace; give a file"):
            Trace.load(path)


# Notebooks.


def test_a_notebook_shows_the_figure(whole, monkeypatch):
    content = everything(3, 2).model_dump() | {"model": '"<b>'}
    shown = Trace(answer.TraceAnswer.model_validate(content))._repr_html_()
    begin = '<img alt="trace of &quot;&lt;b&gt;: 7 sites, 8 tokens, edited" '
    assert shown.startswith(f'{begin}width="700" src="data:image/png;base64,') and shown.endswith(
        '">'
    )
    assert base64.b64decode(shown.split(",")[-1][:-2]).startswith(b"\x89PNG")
    for chosen in (content["sites"][1:], content["sites"][::2]):  # blocks would run on over others
        some = Trace(answer.TraceAnswer.model_validate(content | {"sites": chosen}))
        assert some._repr_html_() is None
    monkeypatch.setattr(depth_map, "find_spec", lambda package: None)
    assert whole._repr_html_() is None


def test_the_notebook_begins_with_its_figure():
    first, *_ = json.loads((ROOT / "examples" / "trace.ipynb").read_text())["cells"]
    ((output,), code) = first["outputs"], "".join(first["source"])
    assert "attnres_serve.trace(" in code and code.endswith("\ntrace")
    assert "".join(output["data"]["text/html"]).startswith('<img alt="trace of demo: 17 sites')


# The package.


def test_imports_of_the_package():
    """Nothing until a trace is asked for, and then nothing that an engine is made of."""
    script = """
import sys
before = set(sys.modules)
import attnres_serve
after = {name for name in sys.modules if name.startswith("attnres_serve")} - before
assert after == {"attnres_serve"}, after
assert not {"numpy", "pydantic", "torch", "typing"} & (set(sys.modules) - before)
assert {"Trace", "trace"} <= {*dir(attnres_serve)}
attnres_serve.trace, attnres_serve.Trace
assert "numpy" in sys.modules
heavy = {"torch", "vllm", "transformers", "matplotlib", "pandas", "xarray"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'traces'"):
        attnres_serve.traces  # noqa: B018
    assert attnres_serve.Trace is Trace and attnres_serve.trace.__module__.endswith(".api")
    assert Path(attnres_serve.__file__).with_name("py.typed").is_file()
