"""Statistics of what is served, in Python and as a figure."""

import json

import httpx
import numpy as np
import pytest
from made_up import MadeUpServer

import attnres_serve
from attnres_serve import cli
from attnres_serve.errors import SettingError

URL = "http://127.0.0.1:8000"


@pytest.fixture
def answer(monkeypatch) -> dict:
    """What the server at ``URL`` answers; what it was asked stands in ``asked``."""
    found = MadeUpServer(3, 2).client.get("/v1/attn_res/statistics").json()
    asked: dict = {"body": found}

    def request(method: str, url: str, headers, **_) -> httpx.Response:
        asked.update(method=method, url=url, headers=headers)
        return httpx.Response(200, json=asked["body"])

    monkeypatch.setattr(httpx, "request", request)
    return asked


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_arrays(answer, phase):
    """Every number at the place that its names say, and NaN where a site has no such source."""
    found = attnres_serve.statistics(URL, key="a key").sel(phase=phase)
    assert (answer["method"], answer["url"]) == ("GET", f"{URL}/v1/attn_res/statistics")
    assert answer["headers"] == {"Authorization": "Bearer a key"}
    assert found["tokens"] == answer["body"]["tokens"][phase]
    assert found.attrs["model"] == "made up"
    np.testing.assert_array_equal(found["bin"], np.arange(16) / 16)
    assert found["source"].values.tolist()[-1] == "partial"
    for site in answer["body"]["sites"]:
        here, own = found.sel(site=site["index"]), site[phase]
        for name in ("mean", "second_moment", "histogram"):
            np.testing.assert_array_equal(here[name].sel(source=site["sources"]), own[name])
        assert here["entropy"] == own["entropy"]
        others = [one for one in found["source"].values if one not in site["sources"]]
        assert np.isnan(here["mean"].sel(source=others)).all()


def test_a_phase_without_tokens(answer):
    answer["body"]["tokens"]["decode"] = 0
    for site in answer["body"]["sites"]:
        site["decode"] = None
    found = attnres_serve.statistics(URL)
    assert np.isnan(found["mean"].sel(phase="decode")).all()
    assert not np.isnan(found["entropy"].sel(phase="prefill")).any()


def test_a_server_that_has_none(answer):
    answer["body"] = {"error": "x"}
    with pytest.raises(SettingError, match="expected an answer of attnres-serve's route"):
        attnres_serve.statistics(URL)


def test_the_figure_of_a_server_and_of_a_file(answer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text(json.dumps(answer["body"]))
    assert cli.main(["inspect", "--from", URL, "--out", "one.svg"]) == 0
    assert cli.main(["inspect", "--from", "s.json", "--out", "two.svg"]) == 0
    assert capsys.readouterr().out == "one.svg\ntwo.svg\n"
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert "prefill, mean over 4 tokens" in drawn and "decode, mean over 12 tokens" in drawn


@pytest.mark.parametrize("out", ["x.html", "x.json"])
def test_what_statistics_are_not(answer, out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "--from", URL, "--out", out]) != 0
    assert "statistics are a figure of counted tokens" in capsys.readouterr().err
    answer["body"] = {"model": "demo"}
    assert cli.main(["inspect", "--from", URL, "--out", "x.png"]) != 0
    assert "statistics are a figure of counted tokens" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
