"""The benchmarks' documents: their fields, and that every figure follows from the times."""

import argparse
import json
import os
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from serving import document_of, run_benchmark

from attnres_serve.bench import document as documents
from attnres_serve.bench import machine
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.ratios import Results, Samples, overheads
from attnres_serve.bench.workload import PHASES, case_of
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder, check_model
from benchmarks import common
from benchmarks.published import page, tables
from benchmarks.serving import latency, one_billion, regression, three_billion
from benchmarks.serving.models import models
from benchmarks.serving.shapes import LLAMAS, SHAPES

PAGE = common.RESULTS / "README.md"
ALL = {"benchmark", "command", "versions", "hardware", "config", "results"}


def strings(node: Any) -> list[str]:
    """Every string of a JSON document, keys included."""
    if isinstance(node, dict):
        return [text for item in node.items() for part in item for text in strings(part)]
    if isinstance(node, list):
        return [text for part in node for text in strings(part)]
    return [node] if isinstance(node, str) else []


def check_document(document: dict[str, Any]) -> None:
    """The fields are there, every figure follows from the seconds, and no machine is named."""
    assert document.keys() >= ALL
    assert document["versions"].keys() >= {"python", "vllm", "torch", "attnres_serve"}
    assert document["hardware"].keys() == {"cpu", "cores", "memory_gib"}
    words = [word for text in strings(document) for word in text.replace("=", " ").split()]
    assert not [word for word in words if word.startswith(("/", "~")) and len(word) > 1]
    assert os.uname().nodename not in words
    CHECKS[document["benchmark"]](document)


class Stored(Samples):
    """The rounds of a document, and their ratios, which are of turns that it does not have."""

    def __init__(self, times: dict[str, Any], part: slice) -> None:
        super().__init__([[seconds] for seconds in times["rounds_s"][part]], [1.0])
        self.stored = times.get("round_ratios", [])[part]

    def ratios(self, baseline: Samples) -> list[float]:
        assert len(self.stored) == len(self.turns)
        return self.stored


def check_cells(point: dict[str, Any], config: dict[str, Any]) -> list[Results]:
    """Every ratio follows from the rounds; returns them as they were measured, start by start."""
    names = list(point["engines"])
    assert names[0] == latency.BASELINE
    rounds, starts = config["rounds"], config["starts"]
    results: list[Results] = [{} for _ in range(starts)]
    for row in point["cells"]:
        for number, start in enumerate(results):
            part = slice(number * rounds, (number + 1) * rounds)
            start[case_of(row)] = {name: Stored(row["engines"][name], part) for name in names}
        assert all(len(row["engines"][name]["rounds_s"]) == starts * rounds for name in names)
    for row, expected in zip(
        point["cells"], documents.case_rows(results, latency.BASELINE), strict=True
    ):
        for name in names:
            typical = expected["engines"][name]["median_s"]
            assert row["engines"][name]["median_s"] == pytest.approx(typical)
        for name in names[1:]:
            check_ratio(row["engines"][name], expected["engines"][name])
    return results


def check_ratio(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for figure in ("ratio", "ci95", "start_ratios"):
        assert found[figure] == pytest.approx(expected[figure])


def check_latency(document: dict[str, Any]) -> None:
    for name, shape in document["results"].items():
        results = check_cells(shape, document["config"])
        sublayers = 2 * shape["shape"]["layers"]
        blocks = sublayers if name.startswith("full") else 9 if "x9" in name else 8
        assert sublayers == blocks * shape["shape"]["block_size"]
        check_overhead(shape, results, latency.BASELINE)
        for name, facts in shape["engines"].items():
            ran = {name for name, ways in facts["executed"].items() if sum(ways.values())}
            assert ran == ({name} if name in latency.ALGORITHMS else set())


def check_one_billion(document: dict[str, Any]) -> None:
    for result in document["results"].values():
        results = check_cells(result, document["config"])
        check_overhead(result, results, latency.BASELINE)
        assert len(result["served"]) == one_billion.STARTS
        (lines,) = tables.of(document)
        assert [line for line in lines if "with it" in line]


def check_overhead(shape: dict[str, Any], results: list[Results], baseline: str) -> None:
    assert shape["overhead"].keys() == set(shape["engines"]) - {baseline}
    for name, found in shape["overhead"].items():
        expected = overheads(results, name, baseline)
        for phase in PHASES:
            check_ratio(found[phase], expected[phase])


CHECKS = {
    "latency": check_latency,
    "serving.one_billion": check_one_billion,
    "serving.three_billion": check_one_billion,
}
RESULTS = [
    path
    for path in sorted(common.RESULTS.glob("*.json"))
    if json.loads(path.read_text()).get("benchmark") in CHECKS
]


def on_file(folder: Path, **changes: Any) -> Path:
    """The figure that ``serving.regression`` compares with, by today's procedure, changed."""
    document = json.loads(regression.ON_FILE.read_text())
    today = {"procedure": PROCEDURE, "starts": 3, "rounds": 5}
    config = document["config"] | today | changes.pop("config", {})
    path = folder / "figure.json"
    path.write_text(json.dumps(document | {"config": config} | changes))
    return path


@pytest.mark.parametrize(
    ("grown", "reach", "status", "said"),
    [
        (1.0, 0.02, 0, "no loss"),
        (1.05, 0.015, 1, "a loss"),
        (1.05, 0.03, 2, "not decided, the interval is too wide"),
        (1.0, 0.05, 2, "not decided, the interval is too wide"),
    ],
)
def test_bench_check_fails_for_a_loss(grown, reach, status, said, monkeypatch, capsys, tmp_path):
    """Of 3 %, where the interval is narrow enough to tell."""
    document = json.loads(regression.ON_FILE.read_text())
    (result,) = document["results"].values()
    overhead = {}
    for phase, found in result["overhead"][regression.ALGORITHM].items():
        ratio = found["ratio"] * grown
        overhead[phase] = {"ratio": ratio, "ci95": [ratio * (1 - reach), ratio * (1 + reach)]}
    now = result | {"overhead": {regression.ALGORITHM: overhead}}
    asked: list[common.Length] = []
    monkeypatch.setattr(latency, "measure", lambda *words: asked.append(words[3]) or now)
    other = document["versions"] | {"torch": "1.0"}
    assert regression.main(["--against", str(on_file(tmp_path, versions=other))]) == status
    assert asked == [common.Length(starts=3, rounds=5)]
    told = capsys.readouterr()
    assert [line.split("; ")[0] for line in told.out.splitlines()] == [
        f"768x12, prefill: {said}",
        f"768x12, decode: {said}",
    ]
    assert f"torch: 1.0 on file, {machine.versions()['torch']} here" in told.err


def test_the_figure_that_bench_check_measures_again_is_by_the_procedure_of_today():
    assert regression.usable(regression.ON_FILE)["results"].keys() == {"768x12"}


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"procedure": 2}},
        {"config": {"flags": []}},
        {"quick": True},
        {"benchmark": "sites"},
        {"results": {"768x12": {"overhead": {"two_phase": {}}}}},
        {"results": {"mixtral-512x8": {"overhead": {"single_pass": {}}}}},
        "{",
        "[]",
        "{}",
    ],
    ids=str,
)
def test_a_figure_that_cannot_be_compared_is_one_sentence(changes, capsys, tmp_path):
    path = on_file(tmp_path, **changes) if isinstance(changes, dict) else tmp_path / "figure.json"
    if isinstance(changes, str):
        path.write_text(changes)
    with pytest.raises(SystemExit):
        regression.main(["--against", str(path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "figure.json is no measurement that can be made again; expected a document of" in last
    path.unlink()
    with pytest.raises(SystemExit):
        regression.main(["--against", str(path)])
    assert "figure.json cannot be read (No such file" in capsys.readouterr().err


def test_a_length_is_what_was_asked_for_or_usual():
    parser = argparse.ArgumentParser()
    common.add_length(parser, 8)
    lengths = {
        "": (8, 4),
        "--starts=1": (1, 8),
        "--rounds=9": (8, 9),
        "--starts=2 --rounds=1": (2, 1),
    }
    for words, (starts, rounds) in lengths.items():
        options = parser.parse_args(words.split())
        assert common.length_of(parser, options, 8) == common.Length(starts, rounds)
    for words in ("--starts=0", "--rounds=0", "--starts=1 --rounds=1"):
        with pytest.raises(SystemExit):
            common.length_of(parser, parser.parse_args(words.split()), 8)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_figures_on_file_follow_from_their_times(path):
    document = json.loads(path.read_text())
    check_document(document)
    assert not document.get("quick")


def test_the_page_is_printed_from_the_documents():
    """By ``python -m benchmarks.published.page > benchmarks/results/README.md``."""
    assert PAGE.read_text() == page.page()


def on_page(stem: str) -> str:
    """The table of a document on file."""
    (lines,) = tables.of(json.loads((common.RESULTS / f"{stem}.json").read_text()))
    return "\n".join(lines)


def test_the_readme_has_what_the_larger_model_pays():
    readme = (common.ROOT / "README.md").read_text()
    for phase in ("prefill", "decode"):
        row = rf"{phase}, mean .* \| ([\d.]+) \(\S+ to ([\d.]+)\)"
        for ratio in re.search(row, on_page("cpu-latency-1024x28")).groups():
            assert f"{100 * (float(ratio) - 1):.1f} %" in readme


def test_the_page_for_trainers_has_their_table():
    assert on_page("cpu-trainers") in (common.ROOT / "docs" / "use" / "rl.md").read_text()


RATIO = r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)|\d\.\d\d \(\d\.\d\d to \d\.\d\d\)"


@pytest.mark.parametrize(("name", "least"), [("results", 40), ("gpu", 1)])
def test_a_ratio_of_the_documentation_is_on_file(name: str, least: int) -> None:
    """With its interval."""
    figures = PAGE.read_text()
    text = (common.ROOT / "docs" / "measure" / f"{name}.md").read_text()
    shown = re.findall(RATIO, text)
    assert len(shown) >= least
    assert [figure for figure in shown if figure not in figures] == []


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("latency", ["--control"]),
        *((f"{size}_billion", ["--starts=1", "--rounds=2"]) for size in ("one", "three")),
    ],
)
def test_the_quick_measurement_runs_end_to_end(name, flags, tmp_path):
    out = tmp_path / "quick.json"
    document = run_benchmark(f"serving.{name}", out, "--quick", *flags)
    assert document["quick"]
    check_document(document)


@pytest.mark.parametrize(
    ("model", "facts", "family", "least", "most"),
    [
        (one_billion, {"layers": 13, "blocks": 4}, "kimi_linear", 1.00e9, 1.03e9),
        # As many tensors and parameters as AttnRes-3B has, in its blocks.
        (three_billion, {"layers": 48, "blocks": 8, "sources": 10}, "normed_llama", 2.7e9, 2.8e9),
    ],
    ids=["one", "three"],
)
def test_the_models_of_billions_of_parameters(model, facts, family, least, most, tmp_path):
    """The tiny one of each kind has all its tensors; the whole one has as many as it says."""
    assert one_billion.write(model.QUICK, tmp_path / "tiny") > 10**6
    assert facts.items() <= describe(check_folder(tmp_path / "tiny")).items()
    (tmp_path / "config.json").write_text(json.dumps(model.SHAPE.config()))
    config = check_model(str(tmp_path), has_weights=False).translated(None).config
    assert least < sum(map(prod, BaseTensors(family, config).needed.values())) < most


def test_what_is_told_of_it(tmp_path, monkeypatch, capsys):
    """A start's row, and the ratios, which are those of another model on file."""
    (stored,) = json.loads((common.RESULTS / "cpu-latency-kimi_linear-512x9.json").read_text())[
        "results"
    ].values()
    start = {"start_s": 61.2, "memory_gib": 5.9}
    start |= {"prompt_tokens_per_s": 210.0, "answer_tokens_per_s": 21.0}
    monkeypatch.setattr(one_billion, "serve", lambda *_: [start] * one_billion.STARTS)
    stored |= {"starts": 8, "rounds": {"discarded": 2, "counted": 4}}
    monkeypatch.setattr(latency, "measure", lambda *_: stored)
    out = tmp_path / "out.json"
    words = ["--quick", "--starts=8", "--rounds=4"]
    document = document_of(one_billion.main, out, capsys, *words)
    check_document(document)
    (lines,) = tables.of(document)
    assert "| without compiled code | 61 s | 5.9 GiB | 210 | 21 |" in lines


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - LLAMAS.keys()))
def test_a_model_of_another_family_has_a_twin(name: str) -> None:
    """Of its family, with eight blocks or nine."""
    shape = SHAPES[name]
    with models(shape) as (folder, baseline, parsed):
        assert (parsed.family, parsed.spec.num_blocks) == (shape.family, 8 + ("x9" in name))
        plain = json.loads((baseline / "config.json").read_text())
        assert plain.get("attn_res") is None
        assert json.loads((folder / "config.json").read_text())["attn_res"] == {"block_size": 2}
