"""``attnres_serve.Trace``: its arrays and axes, differences, files, and what a notebook shows."""

import base64
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest
import xarray
from serving import ROOT

import attnres_serve
from attnres_serve import cli
from attnres_serve.errors import SettingError
from attnres_serve.inspect import answer, labelled, notebook
from attnres_serve.inspect.edits import Edit
from attnres_serve.inspect.readings import WHOLE
from attnres_serve.inspect.traced import Trace
from tests.inspect.test_command import SHAPES, TOKENS, made_up

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


def everything(*shape: int, edited: bool = True, top: int = 3, lens: int = 2) -> answer.Trace:
    """A made-up trace with logprobs and a lens of two mixes, a block and a partial sum."""
    draw, content = random.Random(0), made_up(*shape).model_dump()
    content["tokens"][2]["text"] = "c\0"
    content["logprobs"] = {"unedited": predictions(draw, top)}
    if edited:
        content["logprobs"]["edited"] = predictions(draw, top)
        content["edits"] = [{"sites": [1, "final"], "sources": ["embedding"], "ban": True}]
    vectors = [(0, WHOLE), (1, WHOLE), (None, "block 1"), (1, "partial")]
    content["lens"] = [
        {"site": site, "vector": vector, "predictions": predictions(draw, lens)}
        for site, vector in vectors
    ]
    return answer.Trace.model_validate(content)


@pytest.fixture(scope="module")
def whole() -> Trace:
    return Trace(everything(3, 2))


# Arrays and axes.


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_in_its_place(shape):
    """Under its site, token and source; nothing else is there, and weights sum to 1."""
    found, _, sources = SHAPES[shape]
    trace, rows = Trace(found), range(TOKENS)
    names = trace.axes["source"]
    assert names[0] == "embedding" and names[-1] == "partial" and len({*names}) == len(names)
    blocks = [name for name in names if name.startswith("block")]
    assert names[1:-1] == blocks == [f"block {number + 1}" for number in range(len(blocks))]
    assert sources <= len(names) <= sources + 1  # the last block is nowhere beside its sum
    for name in ("weights", "rms"):
        assert trace[name].shape == (len(found.sites), TOKENS, len(names))
        for site, table in zip(found.sites, trace[name], strict=True):
            for row in rows:
                own = zip(names, table[row].tolist(), strict=True)
                there = {source: number for source, number in own if number == number}
                assert there == dict(zip(site.sources, getattr(site, name)[row], strict=True))
    np.testing.assert_allclose(np.nansum(trace["weights"], axis=-1), 1, atol=ROUNDED)
    assert trace["entropy"].tolist() == [site.entropy for site in found.sites]
    assert [*trace] == ["weights", "rms", "entropy"]


@pytest.mark.parametrize("edited", [True, False])
def test_what_follows(edited):
    """Logprobs with edits and without, and a lens, by vector."""
    found = everything(3, 2, edited=edited)
    trace, both = Trace(found), found.logprobs
    check_predictions(trace, "", both.edited if edited else both.unedited, ())
    assert ("unedited_next" in trace) == edited
    if edited:
        check_predictions(trace, "unedited_", both.unedited, ())
    assert trace.axes["vector"] == ["site 0 mix", "site 1 mix", "block 1", "site 1 partial"]
    assert trace.labels["vector_site"] == ("vector", [0, 1, -1, 1])
    assert trace.labels["vector_name"] == ("vector", ["mix", "mix", "block 1", "partial"])
    for number, reading in enumerate(found.lens):
        check_predictions(trace, "lens_", reading.predictions, (number,))
    assert (trace.axes["rank"], trace.axes["lens_rank"]) == ([0, 1, 2], [0, 1])


def check_predictions(trace: Trace, prefix: str, rows: list, place: tuple) -> None:
    """The arrays of a prefix have the rows at a place."""
    following = [None if np.isnan(x) else x for x in trace[f"{prefix}next"][place].tolist()]
    assert following == [row.next for row in rows]
    for name in ("id", "text", "logprob"):
        wanted = [[getattr(token, name) for token in row.top] for row in rows]
        assert trace[f"{prefix}top_{name}"][place].tolist() == wanted


def test_labels(whole):
    sites, tokens = whole.answer.sites, whole.answer.tokens
    assert whole.axes["site"] == [site.index for site in sites]
    assert whole.axes["token"] == [token.position for token in tokens]
    assert whole.labels["kind"] == ("site", [site.kind for site in sites])
    layers = [site.layer for site in sites]
    assert layers[-1] is None and whole.labels["layer"] == ("site", [*layers[:-1], -1])
    assert whole.labels["token_id"] == ("token", [token.id for token in tokens])
    assert whole.labels["token_text"].values.tolist() == [token.text for token in tokens]


def test_the_shape_of_an_array_is_that_of_its_axes(whole):
    for name, (axes, values) in whole.arrays.items():
        assert values.shape == tuple(len(whole.axes[axis]) for axis in axes)
        assert f"{name} " in repr(whole) and f"{axes[-1]}: {values.shape[-1]})" in repr(whole)
    assert repr(whole).startswith("trace of folder/demo: 7 sites, 8 tokens, edited\n  weights ")


def test_an_array_that_was_not_asked_for():
    with pytest.raises(KeyError, match="no array 'next'; there are weights, rms, entropy"):
        Trace(made_up(2, 2))["next"]


@pytest.mark.parametrize("part", ["sites", "tokens"])
def test_a_trace_of_nothing(part):
    """As a server answers where no site or token is asked for."""
    content = made_up(2, 2).model_dump()
    content[part] = []
    for site in content["sites"]:
        site["weights"], site["rms"], site["entropy"] = [], [], []
    trace = Trace(answer.Trace.model_validate(content))
    assert trace["weights"].size == trace["entropy"].size == 0
    assert trace._repr_html_() is None and len(trace.to_pandas()) == 0
    assert trace.to_xarray().sizes["site"] == len(content["sites"])


# Differences.


def test_a_trace_does_not_differ_from_itself(whole):
    nothing = whole - whole
    names = ["weights", "rms", "entropy", "next", "unedited_next", "lens_next"]
    assert [*nothing] == names  # and no rank, whose tokens may be others
    for name in names:
        there = ~np.isnan(whole[name])
        assert (nothing[name][there] == 0).all() and np.isnan(nothing[name][~there]).all()
    assert nothing.axes == {
        name: whole.axes[name] for name in ("site", "token", "source", "vector")
    }


def test_a_difference():
    """Of the arrays that both have."""
    first = Trace(everything(3, 2, top=1))
    content = everything(3, 2, edited=False).model_dump() | {"model": "other", "lens": None}
    for site in content["sites"]:
        site["weights"] = [row[::-1] for row in site["weights"]]
    second = Trace(answer.Trace.model_validate(content))
    change = first - second
    assert [*change] == ["weights", "rms", "entropy", "next"]
    for name in change:
        np.testing.assert_array_equal(change[name], first[name] - second[name])
    assert np.nanmax(np.abs(change["weights"])) > 0.1 and not np.nanmax(np.abs(change["rms"]))
    assert change.facts == {"first": first.title, "second": second.title}
    assert repr(change).startswith(f"{first.title}\nless {second.title}\n  weights ")
    assert {*change.to_xarray().coords} == {
        *("site", "token", "source", "layer", "kind", "token_id", "token_text")
    }


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda trace: trace.tokens[3].__setattr__("id", 9), "tokens"),
        (lambda trace: trace.tokens[3].__setattr__("position", 9), "tokens"),
        (lambda trace: trace.sites.pop(), "sites or sources"),
        (lambda trace: trace.sites[1].__setattr__("kind", "attention"), "sites or sources"),
        (lambda trace: trace.sites[2].sources.reverse(), "sites or sources"),
    ],
)
def test_traces_that_do_not_belong_together(change, what):
    other = made_up(3, 2)
    change(other)
    with pytest.raises(SettingError, match=f"these traces have other {what}, so"):
        Trace(made_up(3, 2)) - Trace(other)
    with pytest.raises(TypeError):
        Trace(other) - 1


# Files.


@pytest.mark.parametrize("name", ["x.json", "x.npz", "X.NPZ"])
def test_a_file_holds_all_of_a_trace(name, whole, tmp_path):
    path = tmp_path / name
    whole.save(path)
    again = Trace.load(str(path))
    assert again.answer == whole.answer
    assert [path] == [*tmp_path.iterdir()]
    for array in whole:
        np.testing.assert_array_equal(again[array], whole[array])


def test_json_is_what_the_route_answers(whole, tmp_path):
    whole.save(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == whole.answer.model_dump(mode="json")


def test_numpy_reads_arrays_axes_and_labels(whole, tmp_path):
    whole.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert {*found} == {"answer", *whole, *whole.axes, *whole.labels}
        for name in whole:
            if not name.endswith("_text"):
                np.testing.assert_array_equal(found[name], whole[name])
                assert found[name].dtype == whole[name].dtype
        assert found["source"].tolist() == whole.axes["source"]
        assert found["lens_top_text"][0, 0, 0] == whole["lens_top_text"][0, 0, 0].rstrip("\0")


def test_the_command_draws_either_file(whole, tmp_path, capsys):
    sources = [tmp_path / "x.json", tmp_path / "x.npz"]
    pictures = [path.with_name(f"{path.name}.svg") for path in sources]
    for path, picture in zip(sources, pictures, strict=True):
        whole.save(path)
        assert cli.main(["inspect", "--from", str(path), "--out", str(picture)]) == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.parametrize("name", ["x.csv", "x", "json"])
def test_a_name_of_another_kind(name, whole, tmp_path):
    with pytest.raises(SettingError, match=rf"{name}: expected a name that ends with \.json or "):
        whole.save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written(whole, tmp_path):
    with pytest.raises(SettingError, match=r"nowhere/x\.npz cannot be written"):
        whole.save(tmp_path / "nowhere" / "x.npz")


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
    np.savez(path, weights=whole["weights"])
    others = [b"", b"{}", b"PK", b"\xff\xfe", path.read_bytes()]
    whole.save(path)
    saved = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (place,) = [item.header_offset for item in archive.infolist() if "answer" in item.filename]
    damaged = bytearray(saved)
    damaged[place + 99] ^= 0xFF
    for content in (*others, saved[: len(saved) // 2], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(SettingError, match=r"x\.npz is no trace; give a file"):
            Trace.load(path)


# Other libraries.


def test_xarray(whole):
    """Every number by its labels."""
    found = whole.to_xarray()
    assert {*found.data_vars} == {*whole} and found.attrs["model"] == "folder/demo"
    for name in whole:
        assert found[name].dims == whole.arrays[name].axes
        np.testing.assert_array_equal(found[name].values, whole[name])
    site, source = whole.answer.sites[4], whole.answer.sites[4].sources[1]
    own = found.weights.sel(site=site.index, source=source)
    assert own.values.tolist() == [row[1] for row in site.weights]
    assert own.kind == site.kind and own.layer == site.layer
    assert found.token_text.values.tolist() == [token.text for token in whole.answer.tokens]
    (edit,) = json.loads(found.attrs["edits"])
    assert Edit.model_validate(edit) == whole.answer.edits[0]
    assert isinstance((whole - whole).to_xarray(), xarray.Dataset)


def test_pandas(whole):
    """A row for each number that there is, with the labels of its axes."""
    table = whole.to_pandas()
    labels = ["site", "layer", "kind", "token", "token_id", "token_text", "source"]
    assert [*table.columns] == [*labels, "weights", "rms"]
    wanted = [
        (site.index, site.kind, at, source, site.weights[row][column], site.rms[row][column])
        for site in whole.answer.sites
        for row, at in enumerate(whole.axes["token"])
        for column, source in enumerate(site.sources)
    ]
    names = ["site", "kind", "token", "source", "weights", "rms"]
    assert [*table[names].itertuples(index=False, name=None)] == wanted
    assert [*table.index] == [*range(len(wanted))]


def test_pandas_of_each_array(whole):
    for name in whole:
        table, array = whole.to_pandas(name), whole[name]
        missing = array != array  # NaN
        others = [other for other in whole if whole.arrays[other].axes == whole.arrays[name].axes]
        if others == [name]:
            assert table[name].tolist() == array[~missing].tolist()
        assert {*whole.arrays[name].axes, *others} <= {*table.columns}
    lens = whole.to_pandas("lens_top_text")
    one = lens.query("vector == 'block 1' and token == 3 and lens_rank == 1")
    token = whole.answer.lens[2].predictions[3].top[1]
    columns = ["vector_site", "lens_top_id", "lens_top_text", "lens_top_logprob"]
    assert one[columns].values.tolist() == [[-1, token.id, token.text, token.logprob]]
    with pytest.raises(KeyError, match="no array 'weight'"):
        whole.to_pandas("weight")
    assert isinstance((whole - whole).to_pandas("lens_next"), pandas.DataFrame)


@pytest.mark.parametrize("name", ["xarray", "pandas"])
def test_a_library_that_is_missing(name, whole, monkeypatch):
    monkeypatch.setattr(labelled, "find_spec", lambda package: None)
    sentence = f"to_{name} needs {name}, which is not installed; install it, or attnres-serve with"
    with pytest.raises(SettingError, match=f"{sentence} the extra python"):
        getattr(whole, f"to_{name}")()


# Notebooks.


def test_a_notebook_shows_the_figure(whole, monkeypatch):
    content = everything(3, 2).model_dump() | {"model": '"<b>'}
    shown = Trace(answer.Trace.model_validate(content))._repr_html_()
    begin = '<img alt="trace of &quot;&lt;b&gt;: 7 sites, 8 tokens, edited" '
    assert shown.startswith(f'{begin}src="data:image/png;base64,') and shown.endswith('">')
    assert base64.b64decode(shown.split(",")[-1][:-2]).startswith(b"\x89PNG")
    monkeypatch.setattr(notebook, "find_spec", lambda package: None)
    assert whole._repr_html_() is None


def test_a_notebook_shows_any_tokens_of_all_sites():
    """Of chosen sites there is no figure: blocks would run on over those that are left out."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for shape in random.Random(seed).sample([*SHAPES], 2):
        content = SHAPES[shape][0].model_dump()
        rows = sorted(draw.sample(range(TOKENS), draw.randint(1, 3)))
        content["tokens"] = [content["tokens"][row] for row in rows]
        sites = content["sites"]
        every = [*range(len(sites))]
        chosen = draw.choice([every, every[:3], every[1:], every[::2]])
        content["sites"] = [sites[index] for index in chosen]
        for site in content["sites"]:
            for name in ("weights", "rms", "entropy"):
                site[name] = [site[name][row] for row in rows]
        trace = Trace(answer.Trace.model_validate(content))
        shown = trace._repr_html_()
        is_drawn = shown is not None and shown.startswith("<img ")
        assert is_drawn == (chosen == every[: len(chosen)]), (seed, shape, chosen, rows)


def test_the_notebook_begins_with_its_figure():
    first, *_ = json.loads((ROOT / "examples" / "trace.ipynb").read_text())["cells"]
    ((output,), code) = first["outputs"], "".join(first["source"])
    assert "attnres_serve.trace(" in code and code.endswith("\ntrace")
    assert "".join(output["data"]["text/html"]).startswith('<img alt="trace of demo: 17 sites')


# The package.


def test_what_the_package_imports():
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
