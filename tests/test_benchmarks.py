"""The benchmarks' statistics, what they refuse to report, and the documents they have left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from attnres_serve.settings import ALGORITHMS  # noqa: E402
from benchmarks import common, latency, startup  # noqa: E402 - benchmarks/ is not installed

RESULTS = [
    path
    for path in sorted(common.RESULTS.glob("*.json"))
    if json.loads(path.read_text()).get("benchmark") in ("latency", "startup")
]
ALL = {"benchmark", "command", "versions", "hardware", "config", "results"}
ROW = {"shape", "phase", "batch", "tokens", "engine", "median_s", "rounds", "seconds"}
RATIO = {"ratio", "ci95", "ratio_min", "ratio_max"}
FACTS = {"plugin_loaded", "architecture", "compilation", "threads", "executed"}
FACTS |= {"executed_at_start", "start_s", "idle_cores"}


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
    assert document["versions"].keys() == {"python", "vllm", "torch", "attnres_serve"}
    assert document["hardware"].keys() == {"cpu", "cores", "memory_gib"}
    words = [word for text in strings(document) for word in text.replace("=", " ").split()]
    assert not [word for word in words if word.startswith(("/", "~")) and len(word) > 1]
    assert os.uname().nodename not in words
    {"latency": check_latency, "startup": check_startup}[document["benchmark"]](document)


def check_startup(document: dict[str, Any]) -> None:
    (row,) = document["results"]
    seconds = row["seconds"]
    assert len(seconds) == document["config"]["runs"]
    assert row == {**common.spread(seconds), "seconds": seconds}


def check_latency(document: dict[str, Any]) -> None:
    shapes, rounds = document["shapes"], document["config"]["rounds"]
    assert document.keys() >= {"quick", "engines"}
    assert document["engines"].keys() == shapes.keys()
    for shape, engines in document["engines"].items():
        assert next(iter(engines)) == latency.BASELINE
        assert {latency.BASELINE} < set(engines) <= {*latency.ENGINES, latency.CONTROL}
        assert 2 * shapes[shape]["layers"] == 8 * shapes[shape]["block_size"]
        for name, facts in engines.items():
            assert facts.keys() == FACTS
            assert facts["threads"] == document["config"]["threads"]
            check_engine(name, facts, rounds + document["config"]["discarded_rounds"])
    rows = {
        (row["shape"], row["phase"], row["batch"], row["engine"]): row
        for row in document["results"]
    }
    assert (
        len(rows)
        == len(document["results"])
        == sum(len(engines) * len(latency.PHASES) for engines in document["engines"].values())
    )
    for (*where, engine), row in rows.items():
        assert row.keys() == (ROW if engine == latency.BASELINE else ROW | RATIO)
        assert row["rounds"] == len(row["seconds"]) == rounds
        assert row["median_s"] == median(row["seconds"])
        if engine == latency.BASELINE:
            continue
        baseline = rows[(*where, latency.BASELINE)]["seconds"]
        ratios = common.paired_ratios(row["seconds"], baseline)
        assert row["ratio"] == median(ratios)
        assert row["ci95"] == pytest.approx(common.median_interval(ratios))
        assert (row["ratio_min"], row["ratio_max"]) == (min(ratios), max(ratios))


def check_engine(name: str, facts: dict[str, Any], turns: int) -> None:
    engine = latency.Engine(name, process=None, log=Path())
    latency.check(engine, facts, turns, {"executed": facts["executed_at_start"]})


def noisy(rng: np.random.Generator, ratio: float, rounds: int = 15) -> tuple[list, list]:
    """Times of two engines, log-normal noise of 3 %, on a machine that slows down threefold."""
    drift = np.linspace(1, 3, rounds)
    noise = np.exp(0.03 * rng.standard_normal((2, rounds)))
    return (ratio * drift * noise[0]).tolist(), (drift * noise[1]).tolist()


def test_the_interval_covers_a_known_ratio_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        ratios = common.paired_ratios(*noisy(rng, 1.05))
        low, high = common.median_interval(ratios, resamples=1000)
        covered.append(low <= 1.05 <= high)
        assert low <= median(ratios) <= high
        assert high - low < 0.15  # the drift, common to both, does not widen it
    # The percentile interval of a median of 15 covers 92 to 97 %; five standard errors around it.
    assert 0.87 < np.mean(covered) < 0.995


def test_an_interval_narrows_with_rounds_and_is_reproducible():
    rng = np.random.default_rng(2)
    few, many = (common.paired_ratios(*noisy(rng, 1.0, rounds)) for rounds in (15, 400))
    assert np.ptp(common.median_interval(many)) < np.ptp(common.median_interval(few)) / 2
    assert common.median_interval(few) == common.median_interval(few)
    assert common.median_interval([1.5] * 5) == (1.5, 1.5)


def test_ratios_are_taken_within_a_round():
    assert common.paired_ratios([2.0, 30.0, 4.0], [1.0, 10.0, 8.0]) == [2.0, 3.0, 0.5]
    with pytest.raises(ValueError, match="2 rounds against 1"):
        common.paired_ratios([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="not positive"):
        common.paired_ratios([1.0, -0.1], [1.0, 1.0])


def test_rows_pair_each_engine_with_the_baseline_of_its_phase():
    scale = {"baseline": 1.0, "single_pass": 1.1, "two_phase": 0.5, "score_on_write": 1.3}
    samples = {
        (phase, engine): [scale[engine] * (number + 1) * phase.batch for number in range(5)]
        for phase in latency.PHASES
        for engine in latency.ENGINES
    }
    rows = latency.summarise("tiny", samples)
    assert len(rows) == len(samples)
    for row in rows:
        assert row["median_s"] == pytest.approx(3 * row["batch"] * scale[row["engine"]])
        assert ("ratio" in row) == (row["engine"] != "baseline")
        if "ratio" in row:
            assert row["ratio"] == pytest.approx(scale[row["engine"]])
            assert row["ci95"] == pytest.approx([scale[row["engine"]]] * 2)
    assert latency.table(rows).count("\n") == len(rows)


def test_prompts_are_new_in_every_round_and_equal_for_all_engines():
    shape = latency.SHAPES["768x12"]
    assert latency.draw_prompts(shape, 4) == latency.draw_prompts(shape, 4)
    rounds = [latency.draw_prompts(shape, number) for number in range(3)]
    for phase in latency.PHASES:
        prompts = [tuple(prompt) for drawn in rounds for prompt in drawn[phase]]
        assert len(set(prompts)) == len(prompts) == 3 * phase.batch
        assert {len(prompt) for prompt in prompts} == {phase.prompt_tokens}


def facts_of(algorithm: str, **changes: Any) -> dict[str, Any]:
    none = {"eager": 0, "compiled": 0}
    ran = {"eager": 0, "compiled": 10 + 2 * latency.PASSES}
    executed = dict.fromkeys(ALGORITHMS, none) | {algorithm: ran}
    facts = {"plugin_loaded": True, "compilation": "DYNAMO_TRACE_ONCE", "executed": executed}
    start = dict.fromkeys(ALGORITHMS, none) | {algorithm: {"eager": 0, "compiled": 10}}
    return facts | {"executed_at_start": start} | changes


def test_an_engine_that_ran_what_it_should_is_reported():
    check_engine("single_pass", facts_of("single_pass"), 2)
    stock = facts_of("single_pass", plugin_loaded=False, executed={}, executed_at_start={})
    check_engine("baseline", stock, 2)
    check_engine("control", stock, 2)


@pytest.mark.parametrize(
    ("name", "facts", "turns"),
    [
        ("two_phase", facts_of("single_pass"), 2),
        ("single_pass", facts_of("single_pass"), 3),  # prefill was chunked, or a request repeated
        ("single_pass", facts_of("single_pass", compilation="NONE"), 2),
        ("baseline", facts_of("single_pass", executed={}), 2),
    ],
    ids=["other-algorithm", "passes", "eager", "plugin-in-baseline"],
)
def test_an_engine_that_ran_something_else_is_refused(name, facts, turns):
    with pytest.raises(RuntimeError, match="is not what it should be"):
        check_engine(name, facts, turns)


def test_a_command_names_no_folder_of_the_machine():
    shown = common.command_line("benchmarks.startup", ["--model", "/somewhere/else/model", "-x"])
    assert shown == "python -m benchmarks.startup --model model -x"


def test_the_document_of_startup_is_complete(monkeypatch, capsys, tmp_path):
    times = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(startup, "seconds_to_first_token", lambda model: next(times))
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "results" / "startup.json"
    command = ["--runs", "3", "--model", str(tmp_path), "--out", str(out)]
    assert startup.main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    check_document(document)
    assert document["results"][0] | {"seconds": 0} == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "seconds": 0,
    }


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_figures_on_file_follow_from_their_times(path):
    document = json.loads(path.read_text())
    check_document(document)
    assert not document.get("quick")


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_quick_measurement_runs_end_to_end(tmp_path):
    out = tmp_path / "quick.json"
    command = [sys.executable, "-m", "benchmarks.latency", "--quick", "--control"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["quick"]
    check_document(document)
