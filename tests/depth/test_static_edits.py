"""What edits of every token make of a site: a factor of its logits, and a bias for each source."""

from math import log

import pytest

from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.depth.static_edits import MASKED, SiteEdit, from_json, resolve, to_json
from attnres_serve.errors import SettingError

SPEC = AttnResSpec.uniform(Layout.of(3), 2, 1e-6)


def found(*texts: str) -> dict[int, SiteEdit]:
    return resolve([edit_text.read(text) for text in texts], SPEC)


@pytest.mark.parametrize(
    ("texts", "site", "wanted"),
    [
        (['mask sources="block 1"'], 3, SiteEdit(1, (0, MASKED, 0))),
        (["force sources=embedding"], 3, SiteEdit(0, (0, MASKED, MASKED), True)),
        (["mean"], 3, SiteEdit(0, (0, 0, 0), True)),
        (
            ["weights=0.25,0.75 sources=partial,embedding"],
            3,
            (0, (log(0.75), MASKED, log(0.25)), 1),
        ),
        (["weights=1,0 sources=partial,embedding"], 1, (0, (MASKED, 0), 1)),
        (["scale=-2"], 3, SiteEdit(-2, (0, 0, 0))),
        (["scale=2 sources=embedding,partial sites=1"], 1, SiteEdit(2, (0, 0))),
        # In order: a mask stays one under a scale, and gives way to what gives all weights.
        (["mask sources=embedding", "scale=0"], 1, SiteEdit(0, (MASKED, 0))),
        (["mask sources=embedding", "scale=-3"], 1, SiteEdit(-3, (MASKED, 0))),
        (["mask sources=embedding", "mean"], 1, SiteEdit(0, (0, 0), True)),
        (["mean", "mask sources=embedding"], 1, SiteEdit(0, (MASKED, 0), True)),
        (["weights=0.5,0.5 sites=1", "scale=2"], 1, SiteEdit(0, (2 * log(0.5),) * 2, True)),
        (["scale=2", "scale=3"], 6, SiteEdit(6, (0,) * 4)),
    ],
)
def test_a_site_under_edits(texts, site, wanted):
    assert found(*texts)[site] == wanted


def test_sites_without_edits_are_left_out():
    assert found() == {}
    assert found("mean sites=2,final").keys() == {2, 6}
    assert found('mask sources="block 1"').keys() == {2, 3, 4, 5, 6}  # where it is


@pytest.mark.parametrize(
    "texts",
    [
        ["mean", "mask sources=embedding tokens=3"],
        ["scale=2 sources=embedding"],
        ["mask sources=embedding sites=0"],
        ["mask sources=partial sites=1", "mask sources=embedding sites=1"],
        ["mean sites=99"],
        ["mask sources=partial sites=2"],
        ["scale=1000"] * 3,
        ["weights=1e-200,1 sites=1"] + ["scale=1000"] * 2,
    ],
    ids=str,
)
def test_edits_beyond_queries_and_biases_are_refused(texts, sentence):
    sentence.raises(SettingError, found, *texts)


@pytest.mark.parametrize(
    "text",
    [
        "mask 'sources=block 2,partial' 'sites=mlp 3,2,final'",
        "weights=0.1,0.9",
        "scale=-2.5 sites=1 tokens=3:",
        "mean tokens=0,4",
    ],
)
def test_text_and_objects_are_equal(text):
    edit = edit_text.read(text)
    assert edit_text.read(edit_text.write(edit)) == edit
    assert from_json(to_json([edit]), "edits") == [edit]


def test_the_older_name_is_read_and_the_newer_is_written():
    edit = Edit.model_validate({"ban": True, "sources": ["partial"]})
    assert edit == edit_text.read("ban sources=partial") == edit_text.read("mask sources=partial")
    assert to_json([edit]) == [{"mask": True, "sources": ["partial"]}]
    assert edit_text.write(edit) == "mask sources=partial"


@pytest.mark.parametrize(
    "content",
    [3, [{"ban": False}], [{"ban": True, "mask": True}], [{"mean": True}] * 65],
    ids=["a number", "false", "two names", "too many"],
)
def test_a_list_that_is_none(content, sentence):
    sentence.raises(SettingError, from_json, content, "x")
