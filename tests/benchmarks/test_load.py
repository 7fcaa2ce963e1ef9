"""benchmarks/serving/load.py: what is asked of both servers, and the ratios of what they found."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from serving import document_of

from attnres_serve.bench.document import Load
from attnres_serve.compat import bench_client
from attnres_serve.errors import SettingError
from benchmarks.published import tables
from benchmarks.serving import load
from benchmarks.serving.shapes import QUICK

SHAPE = QUICK["128x4"]


def round_of(ours: float, theirs: float) -> load.Round:
    """A round in which every figure of a server is the same one."""
    figures = {load.OURS: ours, load.BASELINE: theirs}
    return {
        name: {count: dict.fromkeys(tables.FIGURES, value) for count in load.AT_A_TIME}
        for name, value in figures.items()
    }


def test_a_ratio_is_ours_to_stock_vllms_in_a_round():
    """Of a start the median round, and of all starts the geometric mean."""
    rows = load.compare(
        [
            [round_of(2, 1), round_of(30, 10), round_of(9, 2)],
            [round_of(16, 2), round_of(10, 10), round_of(6, 2)],
            [round_of(3, 1)] * 3,
        ]
    )
    assert len(rows) == len(load.AT_A_TIME) * len(tables.FIGURES)
    for row in rows:
        assert row["start_ratios"] == [3, 3, 3] and row["ratio"] == pytest.approx(3)
        assert row["ci95"] == pytest.approx([3, 3])
        assert row[load.OURS][0] == [2, 30, 9] and row[load.BASELINE][1] == [2, 10, 2]


def test_one_start_has_the_interval_of_its_rounds():
    (row, *_) = load.compare([[round_of(1.1, 1), round_of(0.9, 1), round_of(1, 1)]])
    assert row["ci95"][0] < 1 < row["ci95"][1]


def test_the_table_has_a_row_for_each_number_of_requests():
    head, _, *rows = tables.load(load.compare([[round_of(1, 1)], [round_of(1, 1)]]))
    assert head.count("|") == len(tables.FIGURES) + 2 and "TTFT, p99" in head
    assert [row.split("|")[1].strip() for row in rows] == ["1", "8", "32"]
    assert "1.000 (1.000 to 1.000)" in rows[0]


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, int, int]]:
    """The server, requests at a time and seed of every load, without servers."""
    found: list[tuple[str, int, int]] = []

    @contextmanager
    def serving(name, folder, flags):
        assert (folder / "tokenizer.json").is_file()
        assert ("attn_res" in json.loads((folder / "config.json").read_text())) == (
            name == load.OURS
        )
        yield name

    def ask(url, at_a_time, seed):
        found.append((url, at_a_time, seed))
        return dict.fromkeys(tables.FIGURES, len(found))

    monkeypatch.setattr(load, "serving", serving)
    monkeypatch.setattr(load, "load", ask)
    return found


def test_both_servers_are_asked_in_turn_with_the_same_prompts(asked):
    rounds = load.start(SHAPE, 2, [], first=0)
    assert len(rounds) == 2 and len(asked) == 3 * len(load.AT_A_TIME) * 2  # one round warms up
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    for one, other in pairs:
        assert {one[0], other[0]} == {load.OURS, load.BASELINE} and one[1:] == other[1:]
    firsts = [pairs[at][0][0] for at in range(0, len(pairs), len(load.AT_A_TIME))]
    assert firsts == [load.OURS, load.BASELINE, load.OURS]
    assert {seed for _, _, seed in asked} == {0, 1, 2}


def test_no_prompt_comes_twice_in_a_measurement(asked, capsys, tmp_path):
    words = ("--starts", "3", "--rounds", "2")
    document = document_of(load.main, tmp_path / "load.json", capsys, *words)
    assert len({(name, count, seed) for name, count, seed in asked}) == len(asked)
    assert document["benchmark"] == "serving.load" and not document["quick"]
    assert len(document["results"]) == len(load.AT_A_TIME) * len(tables.FIGURES)


def test_the_client_is_asked_for_the_figures(monkeypatch):
    asked: list[str] = []

    def ask(arguments):
        asked.extend(arguments)
        return dict.fromkeys(Load.model_fields, 64)

    monkeypatch.setattr(bench_client, "ask_over_http", ask)
    assert load.load("http://x", 8, seed=5) == dict.fromkeys(tables.FIGURES, 64)
    assert {"--max-concurrency=8", "--seed=5", "--num-prompts=64", "--model=load"} <= {*asked}


def test_stock_vllm_is_served_without_the_plugin(tmp_path, monkeypatch):
    """And a server that ends before it is there says so in one sentence."""
    started = []

    @contextmanager
    def running(words, env, **_):
        started.append((words, env))
        yield SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(load.child, "running", running)
    for name in (load.BASELINE, load.OURS):
        with (
            pytest.raises(SettingError, match=f"the server of {name} did not start"),
            load.serving(name, tmp_path, ["--flag"]),
        ):
            pass
    (stock, without), (ours, _) = started
    assert "vllm.entrypoints.openai.api_server" in stock and without["VLLM_PLUGINS"] == ""
    assert ours[2:4] == ["attnres_serve", "serve"] and "--flag" in ours
