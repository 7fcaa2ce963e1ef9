"""``attnres-serve bench``: its statistics, its baseline, what it refuses, and its document."""

import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from safetensors.torch import load_file
from serving import DEMO, GOLDENS, run_module

import attnres_serve.bench
from attnres_serve import output
from attnres_serve.bench import (
    baseline,
    command,
    http,
    machine,
    measure,
    process,
    report,
    server,
    session,
    workload,
)
from attnres_serve.bench import document as documents
from attnres_serve.bench.baseline import read, read_other, twin_config, write_twin
from attnres_serve.bench.engine import Bench
from attnres_serve.bench.ratios import (
    Results,
    Samples,
    geometric_mean,
    interval,
    overheads,
    paired_ratios,
    student,
    summary,
    told,
)
from attnres_serve.bench.session import Outcome
from attnres_serve.bench.workload import Cell, draw_prompts, make_cells
from attnres_serve.checkpoints import checked
from attnres_serve.cli import main
from attnres_serve.compat import bench_client
from attnres_serve.compat.workarounds import malloc
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.flags import usual
from attnres_serve.formats.resolve import resolve

FOLDER = Path(attnres_serve.bench.__file__).parent
PREFILL, DECODE = Cell("prefill", 1, 128, 0), Cell("decode", 8, 64, 16)


# Statistics.


def test_ratios_are_taken_within_a_round():
    assert paired_ratios([2.0, 30.0, 4.0], [1.0, 10.0, 8.0]) == [2.0, 3.0, 0.5]
    with pytest.raises(ValueError, match="2 rounds against 1"):
        paired_ratios([1.0, 1.0], [1.0])
    with pytest.raises(SettingError, match="not positive"):
        paired_ratios([1.0, -0.1], [1.0, 1.0])


def test_students_t_is_that_of_the_tables():
    found = [student(freedom) for freedom in (1, 2, 7, 30)]
    assert found == pytest.approx([12.7062, 4.3027, 2.3646, 2.0423], abs=1e-4)


def test_the_interval_over_starts_is_students():
    logs = np.log([1.01, 1.03, 1.02])
    reach = student(2) * np.std(logs, ddof=1) / np.sqrt(3)
    middle = np.log(geometric_mean([1.01, 1.03, 1.02]))
    expected = np.exp([middle - reach, middle + reach])
    assert interval([1.01, 1.03, 1.02]) == pytest.approx(expected)
    hiccups = [[1.01, 1.01, 9.0], [0.1, 1.03, 1.03], [1.02, 1.02, 1.02]]
    assert summary(hiccups)["ci95"] == pytest.approx(expected)
    assert summary([[1.01, 1.03, 1.02]])["ci95"] == pytest.approx(expected)  # over its rounds


def to_itself(ratio: float, luck: float, starts: int, rounds: int) -> list[list[list[float]]]:
    """Ratios of every round of every start of many measurements, log-normal about ``ratio``.

    Args:
        ratio: the true one.
        luck: of a pair of processes, a standard deviation; rounds scatter by 1.3 % beside it.
        starts, rounds: of each measurement.
    """
    rng = np.random.default_rng(3)
    drawn = luck * rng.standard_normal((1000, starts, 1))
    noise = 0.013 * rng.standard_normal((1000, starts, rounds))
    return (ratio * np.exp(drawn + noise)).tolist()


@pytest.mark.parametrize("luck", [0.0, 0.006, 0.011])
def test_a_slowdown_of_5_percent_is_seen_and_none_is_not(luck):
    """By the luck that processes had on a machine, and without any."""
    usual = workload.STARTS, workload.ROUNDS
    slowed = [summary(starts)["ci95"][0] > 1 for starts in to_itself(1.05, luck, *usual)]
    assert np.mean(slowed) > 0.99
    alike = [summary(starts)["includes_1"] for starts in to_itself(1.0, luck, *usual)]
    assert 0.93 < np.mean(alike) < 0.97


def test_one_start_does_not_know_the_luck_of_a_process():
    alike = to_itself(1.0, 0.011, 1, workload.ROUNDS_OF_ONE)
    assert np.mean([summary(starts)["includes_1"] for starts in alike]) < 0.8


@pytest.mark.parametrize(
    ("ratio", "reach", "starts", "expected"),
    [
        (1.0123, 0.004, 4, "1.012 (1.008 to 1.016)"),
        (1.0123, 0.012, 4, "1.01 (1.00 to 1.02)"),
        (1.0123, 0.2, 4, "1.0 (0.8 to 1.2)"),
        (1.0123, 0.0004, 1, "1.01 (1.01 to 1.01)"),  # two starts differ by more than that
        (1.0123, 0.9, 1, "1.0 (0.1 to 1.9)"),
    ],
)
def test_a_ratio_has_the_digits_that_are_to_be_believed(ratio, reach, starts, expected):
    found = {"ratio": ratio, "ci95": [ratio - reach, ratio + reach], "start_ratios": [1.0] * starts}
    assert told(found) == expected


# Work.


LINEAR = {"type": "linear", "factor": 2.0}


def leave_out(folder: Path, key: str) -> None:
    """Of a checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def test_cells_fit_the_model():
    cells = make_cells(256, None, (1, 8), None, 32)
    assert cells == [
        Cell("prefill", 1, 128, 0),
        Cell("prefill", 1, 255, 0),  # 512 would not fit
        Cell("decode", 1, 128, 32),
        Cell("decode", 8, 128, 32),
    ]
    longest = max(cell.context + cell.max_tokens for cell in cells)
    assert longest <= 256


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize(
    ("base", "options", "tokens"),
    [
        ("mamba2", {}, 2048),  # states none
        ("llama", {"max_positions": 64, "changes": {"rope_scaling": LINEAR}}, 128),
    ],
)
def test_cells_fit_the_context_as_vllm_counts_it(
    base, options, tokens, over_http, monkeypatch, tmp_path
):
    class Seen(Exception):
        pass

    def made(longest: int, *_: Any) -> None:
        raise Seen(longest)

    monkeypatch.setattr(workload, "make_cells", made)
    from checkpoints import write_house  # imports Triton, which tests of its kernels interpret

    folder = str(write_house(tmp_path, base, layers=2, block_size=2, **options))
    if base == "mamba2":
        leave_out(tmp_path, "max_position_embeddings")
    names = ("prompt_lengths", "batches", "contexts", "quick")
    own = SimpleNamespace(**dict.fromkeys(names), http="x", steps=1, baseline="auto")
    source = read(folder, has_weights=True)
    whole = partial(http.measure, folder) if over_http else partial(command.measure, source)
    if over_http:
        tokens -= tokens // http.SPARE
    with pytest.raises(Seen, match=f"^{tokens}$"):
        whole(own, [], server.Served("demo", inf) if over_http else [])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (((64,), (1,), None, 300), "--steps is 300, but prompt and answer have room for 256"),
        (((256,), (1,), None, 8), r"--prompt-lengths has 256; expected 1 to 255"),
        (((64,), (0,), None, 8), "--batches has 0; expected 1 to"),
        (((64,), (1,), (250,), 8), "--contexts has 250; expected 1 to 243"),
    ],
)
def test_work_that_does_not_fit_is_refused(asked, sentence):
    with pytest.raises(SettingError, match=sentence):
        make_cells(256, *asked)


def test_prompts_are_new_in_every_round_and_equal_for_all_engines():
    assert draw_prompts(DECODE, 1000, 4) == draw_prompts(DECODE, 1000, 4)
    drawn = [tuple(prompt) for number in range(3) for prompt in draw_prompts(DECODE, 1000, number)]
    assert len(set(drawn)) == len(drawn) == 3 * DECODE.batch
    assert {len(prompt) for prompt in drawn} == {DECODE.context}


# The baseline.


@pytest.mark.parametrize(
    "golden", ["fla_transformer_block", "qwen3_attnres_full", "qwen3_attnres_cumulative_block"]
)
def test_the_twin_is_the_base_model_with_the_same_weights(golden, tmp_path):
    source = read(str(GOLDENS / golden), has_weights=True)
    write_twin(source, tmp_path / "twin")
    config = json.loads((tmp_path / "twin" / "config.json").read_text())
    shapes = FAMILIES[source.parsed.base].shapes(config)
    own = load_file(source.folder / "model.safetensors")
    twin = load_file(next((tmp_path / "twin").glob("*.safetensors")))
    assert {name: tuple(tensor.shape) for name, tensor in twin.items()} == {
        name: tuple(shape)
        for name, shape in shapes.items()
        if name != "lm_head.weight" or not config.get("tie_word_embeddings")
    }
    assert not [key for key in config if "attn_res" in key or "attnres" in str(config[key])]
    values = [tensor for tensor in own.values()]
    for tensor in twin.values():
        assert any(
            tensor.shape == other.shape and torch.equal(tensor, other) for other in values
        ), "a tensor of the twin is none of the checkpoint's"


def test_a_baseline_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "twin").write_text("in the way")
    with pytest.raises(SettingError, match=r"^the baseline cannot be written .*TMPDIR\.$"):
        write_twin(read(str(DEMO), has_weights=True), tmp_path / "twin")


def test_a_model_that_stock_vllm_has_not_is_compared_with_ours_without_sites():
    source = read(str(GOLDENS / "nanogpt_block"), has_weights=True)
    plain = resolve(twin_config(source.parsed), names=tuple)
    assert (plain.base, plain.spec) == ("gated_llama", None)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_class_that_needs_a_gpu_is_compared_with_ours_on_a_cpu(on_cpu, monkeypatch):
    """The same class of ours, without sites; it is what vLLM's own computes."""
    monkeypatch.setattr(baseline.vllm_source, "is_cpu_build", lambda: on_cpu)
    parsed = read(str(GOLDENS.parent / "family_goldens" / "kimi_linear"), has_weights=True).parsed
    twin = twin_config(parsed)
    if not on_cpu:
        assert twin["architectures"] == ["KimiLinearForCausalLM"] and "attn_res" not in twin
        return
    assert twin["model_type"] == "attnres_kimi_linear" and twin["attn_res"] is None
    plain = resolve(twin, names=tuple)
    assert (plain.base, plain.spec) == ("kimi_linear", None)


# The engines.


def test_the_baseline_has_no_plugin_and_the_engines_equal_threads(tmp_path):
    stock, ours = (
        process.Contender("a", ()),
        process.Contender("b", (), "single_pass", has_plugin=True),
    )
    plain, with_sites = (process.environment(it, tmp_path, 2) for it in (stock, ours))
    assert plain.pop("VLLM_PLUGINS") == ""
    assert with_sites.pop("VLLM_PLUGINS") == "attnres"
    assert plain == with_sites
    assert plain["OMP_NUM_THREADS"] == "2"
    assert malloc.keep_freed().items() <= plain.items()
    assert len(plain["GOMP_CPU_AFFINITY"].split()) == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("usage: x\nengine.py: error: unrecognized arguments: --foo\n", "arguments: --foo"),
        (
            "Traceback\nValueError: no\nmore\nRuntimeError: it ended\n  because\n",
            "ended .because.;",
        ),
        ("", "without a word"),
        ("no error\nThe system says no.\n", "ended .The system says no.;"),
        ("Traceback\nAssertionError\n", "ended .AssertionError.;"),
        ("an older Error: of no interest\nKILL", "ended .by signal 9.;"),
        ("ValueError: " + "a-word " * 60, r"ended .ValueError: (a-word )+a-word.;"),
        ("ValueError:" + "x" * 400, r"ended .ValueError:x{289}.;"),
    ],
)
def test_an_engine_that_ends_says_why(log, told, tmp_path):
    """The sentence has the reason; the log is kept where it says."""
    script = tmp_path / "script.py"
    end = "import os; sys.stderr.flush(); os.kill(os.getpid(), 9)" if log.endswith("KILL") else ""
    script.write_text(f"import sys; sys.stderr.write({log!r})\n{end}")
    contender = process.Contender("attnres", (), script=script)
    with (
        pytest.raises(SettingError, match=told) as caught,
        process.running(contender, tmp_path / "log", tmp_path, 1),
    ):
        pass
    (kept,) = re.findall(r"its log is (\S+)\.$", str(caught.value))
    assert Path(kept).read_text() == log
    Path(kept).unlink()


TELLS = """
from attnres_serve.compat import failures
with failures.told():
    raise ValueError("no\\nroom")
"""


def test_an_engine_tells_why_it_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    contender = process.Contender("attnres", (), script=script)
    with (
        pytest.raises(SettingError, match=r"ended \(ValueError: no room\); its log is") as caught,
        output.libraries_hidden("bench"),
        process.running(contender, tmp_path / "log", tmp_path, 1),
    ):
        pass
    Path(re.findall(r"its log is (\S+)\.$", str(caught.value))[0]).unlink()


def test_workers_bind_their_own_threads(tmp_path):
    parallel = process.Contender("a", ("--tensor-parallel-size=2",))
    found = process.environment(parallel, tmp_path, 2)
    assert found.get("GOMP_CPU_AFFINITY") == os.environ.get("GOMP_CPU_AFFINITY")


def test_an_engines_peak_is_its_own(tmp_path):
    """Not that of the process that started it."""
    script = tmp_path / "script.py"
    script.write_text("from attnres_serve.bench import engine; print(engine.peak_memory())")
    held = np.ones(2**30, np.uint8)
    own = int(subprocess.check_output([sys.executable, script], cwd=FOLDER.parents[1]))
    assert 2**20 < own < held.size


# What is refused.


def facts(**changes: Any) -> dict[str, Any]:
    none = {"eager": 3, "compiled": 0}
    executed = {"single_pass": {"eager": 0, "compiled": 9}, "two_phase": none}
    same = dict.fromkeys(measure.SAME, 1) | {"prefix_caching": False, "compiled": True}
    return same | {"plugin_loaded": True, "executed": executed} | changes


def engine(name: str, algorithm: str | None, at_start: dict[str, Any]) -> process.Engine:
    return process.Engine(
        process.Contender(name, (), algorithm, algorithm is not None), None, Path(), at_start
    )


def test_engines_that_differ_are_not_compared():
    base = engine("baseline", None, facts())
    measure.check_alike([base, engine("attnres", "single_pass", facts())])
    with pytest.raises(SettingError, match=r"dtype is 2 in the engine of attnres and 1 in that of"):
        measure.check_alike([base, engine("attnres", "single_pass", facts(dtype=2))])
    with pytest.raises(SettingError, match="prefix caching is on"):
        measure.check_alike([engine("baseline", None, facts(prefix_caching=True))])


AFTER = {"single_pass": {"eager": 0, "compiled": 20}, "two_phase": {"eager": 3, "compiled": 0}}
EAGER = {"single_pass": {"eager": 9, "compiled": 9}, "two_phase": {"eager": 3, "compiled": 0}}
OTHER = {"single_pass": {"eager": 0, "compiled": 9}, "two_phase": {"eager": 3, "compiled": 5}}


def test_an_engine_that_ran_what_it_should_is_reported():
    measure.check_ran(engine("attnres", "single_pass", facts()), facts(executed=AFTER))
    chosen = facts(executed=AFTER, algorithm="single_pass")
    measure.check_ran(engine("attnres", "auto", facts()), chosen)
    stock = facts(executed={}, plugin_loaded=False)
    measure.check_ran(engine("baseline", None, stock), stock)


@pytest.mark.parametrize(
    ("algorithm", "after"),
    [
        ("single_pass", facts(executed=OTHER)),
        ("single_pass", facts(executed=EAGER)),
        ("single_pass", facts()),
        ("auto", facts(executed=AFTER, algorithm="two_phase")),
        ("single_pass", facts(executed=AFTER, plugin_loaded=False)),
        (None, facts(executed=AFTER)),
    ],
    ids=[
        "other-algorithm",
        "eager",
        "no-site",
        "not-as-told",
        "without-plugin",
        "plugin-in-baseline",
    ],
)
def test_an_engine_that_ran_something_else_is_refused(algorithm, after):
    with pytest.raises(SettingError, match=r"ran .* expected .*: its figures would be another's"):
        measure.check_ran(engine("attnres", algorithm, facts()), after)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere/at/all"], "nowhere/at/all does not exist"),
        (["--quick", str(DEMO)], "bench needs a checkpoint as its first argument"),
        ([str(DEMO), "--model", "demo"], "--model goes with --http"),
        ([str(DEMO), "--revision", "main"], "--revision is not looked up here"),
        ([str(DEMO), "--baseline", "nowhere/at/all"], "nowhere/at/all does not exist"),
        ([str(DEMO), "--baseline", str(DEMO)], "has Attention Residuals (house); expected"),
        ([str(DEMO), "--steps", "5000"], "--steps is 5000"),
        ([str(DEMO), "--starts", "0"], "--starts is 0; expected at least 1."),
        ([str(DEMO), "--additional-config", "{}"], "--additional-config would be ours in one"),
        ([str(DEMO), "--speculative-config", "{}"], "--speculative-config makes a step give sev"),
        ([str(DEMO), "--speculative_config.method=ngram"], "measure a server with drafts and one"),
        ([str(DEMO), "-sc", "{}"], "-sc makes a step give several tokens"),
        ([str(DEMO), "--enforce-eager"], "--enforce-eager makes a norm of vLLM's many operators"),
        ([str(DEMO), "--enforce_eager", "--quick"], "AttnRes would seem faster than no AttnRes"),
        ([str(DEMO), "--max-model-len", "4k"], "--max-model-len is 4k; expected a whole number"),
        ([str(DEMO), "--max_model_len=30", "--contexts", "99"], "--steps is 48, but prompt and"),
        ([str(DEMO), "--out", "/nowhere/at/all"], "--out: /nowhere/at is not a folder"),
        (
            [str(DEMO), "--max-modle-len", "9"],
            "found --max-modle-len, which is no flag; did you",
        ),
        ([str(DEMO), "--quikc"], "found --quikc, which is no flag; did you mean --quick?"),
        ([str(DEMO), "--http", "127.0.0.1:8000"], "has no scheme; expected http://HOST:PORT, for"),
        ([str(DEMO), "--http", "ftp://x"], "--http is ftp://x; expected http://HOST:PORT"),
        ([str(DEMO), "--http", "http://x:port"], "--http is http://x:port; expected http://HOST"),
        ([str(DEMO), "--http", "http:///v1"], "--http is http:///v1; expected http://HOST:PORT"),
        ([str(DEMO), "--http", "http://x", "--budget", "2"], "--budget does not go with --http"),
        ([str(DEMO), "--budget", "-1"], "--budget is -1; expected a number of minutes above 0."),
        ([str(DEMO), "--http", "http://x", "--starts", "2"], "--starts does not go with --http"),
        ([str(DEMO), "--http", "http://x", "--baseline", "y"], "--baseline does not go with"),
        ([str(DEMO), "--load-format", "dummy", "--contexts", "9999"], "--contexts has 9999"),
        ([str(DEMO), "--max-model-len", "999999"], "has a context of 1024 tokens; give at most"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("attnres-serve: ") and sentence in said
    assert "Traceback" not in said


# What an engine would end at.  The process says too whether it imported torch.
EARLY = """
import sys
from attnres_serve.cli import main
from attnres_serve.compat import source
source.is_cpu_build = lambda: True
source.head_sizes = lambda: [{size}]
status = main(["bench", {folder!r}, *{words}])
print(status, {{"torch", "vllm"}} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "size", "sentence"),
    [
        (["--attnres-backend", "triton"], 64, "--attnres-backend is triton, which needs a GPU"),
        (["--max-model-len=999999", "--quick"], 64, "--max-model-len is 999999, and"),
        ([], 7, "has heads of the size 64, and vLLM's attention on CPU computes those of 7"),
        ([], 64, "found no 'g++' on the path"),
    ],
    ids=["backend", "context", "heads", "compiler"],
)
def test_what_serve_refuses_is_refused_before_torch_is_imported(words, size, sentence, tmp_path):
    script = EARLY.format(folder=str(DEMO), words=words, size=size)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "2 set()\n", done.stderr
    assert sentence in done.stderr and done.stderr.count("\n") == 1


# The document.


def outcome(*ratios: float, rounds: int = 9) -> Outcome:
    """Samples of AttnRes that take, start by start, these times the baseline's in every round."""
    results: list[Results] = []
    for ratio in ratios:
        results.append({})
        for cell in (PREFILL, DECODE):
            results[-1][cell] = {"baseline": Samples(), "attnres": Samples()}
            for number in range(rounds):
                seconds = 0.01 * (1 + number)
                for name, scale in (("baseline", 1.0), ("attnres", ratio)):
                    samples = results[-1][cell][name]
                    samples.turns.append([scale * seconds] * 3)
                    samples.first += [scale * seconds] * cell.batch
                    samples.steps += [scale * seconds] * cell.steps
    facts_of = {"architecture": "A", "start_s": 1.0, "peak_memory_bytes": 10**9, "executed": {}}
    facts_of["kv_cache_tokens"] = 4096
    engines = {"baseline": facts_of, "attnres": facts_of}
    return Outcome(engines, results, 60.0)


def document(*ratios: float, **config: Any) -> dict[str, Any]:
    """The document of a run with a start for every ratio."""
    found = outcome(*ratios)
    made = {
        "command": "attnres-serve bench demo",
        "quick": False,
        "versions": {"vllm": "0"},
        "hardware": {"cpu": "C", "cores": 2, "memory_gib": 8.0},
        "config": {
            **{"checkpoint": "demo", "baseline": "auto", "baseline_differs_in": []},
            **{"weights": "checkpoint", "format": "house", "backbone": "llama", "layers": 8},
            **{"hidden_size": 192, "blocks": 4, "dtype": "bfloat16", "compiled": True},
            **{"backend": "cpp", "algorithm": "single_pass", "threads": 2, "flags": []},
            **{"starts": len(ratios), "rounds": 9, "discarded_rounds": 2, "procedure": 6},
            **documents.interval_over(len(ratios)),
            **config,
        },
        "took_s": found.took_s,
        "ended_by": "starts",
        "overhead": {"attnres": overheads(found.results, "attnres", "baseline")},
        **documents.content(found, "baseline"),
    }
    return documents.Document.model_validate(made).model_dump()


def test_a_known_ratio_is_reported():
    for phase in ("prefill", "decode"):
        found = document(1.05)["overhead"]["attnres"][phase]
        assert found["ratio"] == pytest.approx(1.05)
        assert found["ci95"] == pytest.approx([1.05, 1.05])
        assert not found["includes_1"]
    assert document(1.0)["overhead"]["attnres"]["decode"]["includes_1"]


def test_the_figures_follow_from_the_rounds():
    made = document(1.02, 1.03, 1.04)
    for row in made["cells"]:
        base, ours = row["engines"]["baseline"], row["engines"]["attnres"]
        assert len(base["rounds_s"]) == made["config"]["starts"] * made["config"]["rounds"]
        starts = [base["rounds_s"][start : start + 9] for start in (0, 9, 18)]
        assert base["median_s"] == pytest.approx(geometric_mean(list(map(median, starts))))
        ratios = ours["round_ratios"]
        assert ratios == pytest.approx(paired_ratios(ours["rounds_s"], base["rounds_s"]))
        each = [median(ratios[start : start + 9]) for start in (0, 9, 18)]
        assert ours["start_ratios"] == each
        assert ours["ratio"] == pytest.approx(geometric_mean(each))
        assert ours["ci95"] == pytest.approx(interval(each))
        tokens = row["context"] if row["phase"] == "prefill" else row["batch"]
        assert base["tokens_per_s"] == pytest.approx(tokens / base["median_s"])
    decode = made["cells"][1]["engines"]["baseline"]
    assert decode["itl_s"]["p50"] == pytest.approx(0.05)
    assert made["cells"][0]["engines"]["baseline"]["itl_s"] is None


def test_the_mean_over_cells_is_taken_within_a_round():
    """Noise that is common to the cells of a round stays in the interval."""
    (results,) = outcome(1.0).results
    more = replace(DECODE, batch=1)
    results[more] = {name: replace(samples) for name, samples in results[DECODE].items()}
    slow = results[DECODE]["attnres"]
    slow.turns = [[2 * time for time in turns] for turns in slow.turns]
    found = overheads([results], "attnres", "baseline")["decode"]
    assert found["ratio"] == pytest.approx(geometric_mean([2.0, 1.0]))


def test_an_overhead_has_the_starts_as_its_sample():
    starts = [1.02, 1.03, 1.04]
    found = overheads(outcome(*starts).results, "attnres", "baseline")["prefill"]
    assert found["start_ratios"] == pytest.approx(starts)
    assert found["ratio"] == pytest.approx(geometric_mean(starts))
    assert found["ci95"] == pytest.approx(interval(starts))
    assert found["includes_1"] == (found["ci95"][0] <= 1)


class Asked(process.Engine):
    """An engine that answers at once, a prefill's first token after the seconds it is given.

    Attributes:
        said: what engines were asked to begin or to go on with, which is None.
        step: seconds of a step of decode.
    """

    def __init__(self, name: str, said: list, seconds: list[float]) -> None:
        super().__init__(process.Contender(name, ()), None, Path(), facts(vocabulary=50))
        self.said, self.seconds, self.step = said, itertools.cycle(seconds), 0.5

    def ask(self, what: str, **asked: Any) -> Any:
        if what == "generate":
            assert asked["max_tokens"] == workload.WARM_STEPS
            return None
        self.said.append((self.name, asked.get("prompts")))
        return getattr(self, what)(**asked)

    def begin(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        self.batch, self.left = len(prompts), max_tokens - 1
        return {"first": [next(self.seconds)]}

    def decode(self, most: int) -> dict[str, Any]:
        self.left -= most
        assert self.left >= 0, "more steps than tokens"
        return {"steps": [self.step] * most, "running": [self.batch] * most}


def test_engines_are_asked_in_turn_and_a_round_of_prefill_is_a_median():
    said: list = []
    engines = [Asked(name, said, seconds) for name, seconds in (("a", [1, 9, 2, 9, 9]), ("b", [3]))]
    found = rounds_of(engines, PREFILL, 6)
    assert found[PREFILL]["a"].rounds == [9.0] * 6 and found[PREFILL]["b"].rounds == [3.0] * 6
    assert len(found[PREFILL]["a"].first) == 6 * PREFILL.turns
    pairs = list(zip(said[::2], said[1::2], strict=True))
    assert len(pairs) == (6 + measure.DISCARDED) * PREFILL.turns
    assert all(one[1] == other[1] and one[0] != other[0] for one, other in pairs)
    assert [one[0] for one, _ in pairs[:4]] == ["a", "b", "b", "a"]
    assert len({str(one[1]) for one, _ in pairs}) == len(pairs), "a prompt came twice"


def rounds_of(engines: list[Asked], cell: Cell, rounds: int, start: int = 0) -> Results:
    """What some rounds of a start found."""
    return [*measure.measure(engines, [cell], rounds, start, lambda what: None)][-1]


class Started(Asked):
    """An engine whose start, end and facts are told."""

    def ask(self, what: str, **arguments: Any) -> Any:
        if what == "facts":
            return facts(executed={}, plugin_loaded=False, start_s=float(len(self.said)))
        return super().ask(what, **arguments)


def test_every_start_has_new_engines_started_in_another_order(monkeypatch):
    events: list[tuple[str, str]] = []
    said: list = []
    compiled: dict[str, set[Path]] = {"baseline": set(), "other": set()}

    @contextmanager
    def running(contender: process.Contender, log: Path, cache: Path, threads: int):
        events.append(("starts", contender.name))
        compiled[contender.name].add(cache)
        yield Started(contender.name, said, [1.0 if contender.name == "baseline" else 2.0])
        events.append(("ends", contender.name))

    monkeypatch.setattr(session, "running", running)
    contenders = [process.Contender(name, ()) for name in ("baseline", "other")]
    found = session.run(contenders, [PREFILL], 4, 2, 1)
    started = [name[0] for what, name in events if what == "starts"]
    assert "".join(started) == "boobobbo"
    assert [what for what, _ in events] == 4 * ["starts", "starts", "ends", "ends"]
    assert all(len(folders) == 1 for folders in compiled.values()), "compiled code is not kept"
    assert compiled["baseline"] != compiled["other"]
    assert [start[PREFILL]["other"].rounds for start in found.results] == 4 * [[2.0, 2.0]]
    assert list(found.engines) == ["baseline", "other"]
    turns = 4 * (2 + measure.DISCARDED) * PREFILL.turns
    assert len({str(prompts) for _, prompts in said}) == turns, "a prompt came twice"
    assert found.engines["other"]["start_s"] == len(said) / 4, "not of the first start"


@pytest.mark.parametrize(
    ("budget", "starts"),
    [(inf, 4), (1, 1), (62, 1), (64, 2), (71, 2), (73, 3), (91, 3), (93, 4)],
)
def test_no_start_but_the_first_overruns_the_budget(budget, starts, monkeypatch):
    """The first takes 30 seconds, because it compiles, and any other 20; a tenth is left."""
    clock = [0.0]

    @contextmanager
    def running(contender: process.Contender, *_):
        clock[0] += 10.0 if clock[0] >= 30 else 15.0
        yield Started(contender.name, [], [1.0])

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    contenders = [process.Contender(name, ()) for name in ("baseline", "other")]
    found = session.run(contenders, [PREFILL], 4, 2, 1, budget=budget)
    assert len(found.results) == starts
    assert found.took_s == 30 + 20 * (starts - 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_sees_the_ratio_as_it_narrows(stream, monkeypatch):
    """Anything else sees no progress at all."""
    seen = stream()
    monkeypatch.setattr(output, "err", lambda: seen)
    ratios = {"baseline": itertools.repeat(1.0), "attnres": itertools.cycle([1.01, 1.03])}

    @contextmanager
    def running(contender: process.Contender, *_):
        yield Started(contender.name, [], [next(ratios[contender.name])])

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    contenders = [process.Contender(name, ()) for name in ratios]
    session.run(contenders, [PREFILL], 4, 2, 1)
    said = seen.getvalue()
    if stream is io.StringIO:
        assert said == ""
        return
    assert "start 1 of 4, starting baseline" in said and "prefill of 128 tokens" in said
    assert "prefill 1.01 (1.01 to 1.01)" in said  # of one start
    assert "prefill 1.02 (1.00 to 1.04)" in said  # of four


@pytest.mark.parametrize("number", [2, 3, 4])
def test_no_engine_is_asked_first_more_often(number):
    """Over the usual starts, by a turn or two; a start of three has half of the orders."""
    asked: dict[str, list[str]] = {"begin": [], "decode": []}
    for start in range(workload.STARTS):
        said: list = []
        engines = [Asked(name, said, [1.0]) for name in "abcd"[:number]]
        rounds_of(engines, DECODE, workload.ROUNDS, start)
        for what, turns in (("begin", 1), ("decode", len(DECODE.slices))):
            found = [name for name, prompts in said if (prompts is None) == (what == "decode")]
            asked[what] += found[measure.DISCARDED * turns * number :]
    for what, names in asked.items():
        before: Counter[str] = Counter()
        turns = [names[at : at + number] for at in range(0, len(names), number)]
        for turn in turns:
            before.update(
                "".join(sorted(pair)) + pair[0] for pair in itertools.combinations(turn, 2)
            )
        off = [abs(count - len(turns) / 2) for count in before.values()]
        assert max(off) <= number // 2, (what, before)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_no_engine_has_the_better_place(number):
    """Over 2 x engines turns each comes first as often, and behind none more often than behind
    another of its two neighbours."""
    engines = [engine(name, None, {}) for name in "abcd"[:number]]
    turns = [
        "".join(one.name for one in measure.order(engines, turn)) for turn in range(2 * number)
    ]
    assert Counter(turn[0] for turn in turns) == dict.fromkeys("abcd"[:number], 2)
    behind = Counter(pair for turn in turns for pair in pairwise(turn))
    assert all(count == behind[pair[::-1]] for pair, count in behind.items())


def test_a_ratio_is_taken_within_a_turn():
    """Not between medians of turns, which may be of different turns."""
    ours, base = Samples([[1.0, 20.0, 3.0]] * 2), Samples([[2.0, 10.0, 30.0]] * 2)
    assert ours.ratios(base) == [0.5, 0.5]  # of 0.5, 2 and 0.1; the medians are 3 and 10


class Staggered(Asked):
    """An engine whose prompts begin one after the other, and end so."""

    few = 3

    def decode(self, most: int) -> dict[str, Any]:
        answer = super().decode(most)
        alone = min(most, max(0, self.few - self.left))
        if alone:
            answer["steps"][-alone:] = [50.0] * alone
            answer["running"][-alone:] = [1] * alone
        answer["steps"][: workload.UNTIMED] = [100.0] * workload.UNTIMED
        return answer


def test_only_steps_of_the_whole_batch_count():
    engines = [Staggered(name, [], [1.0]) for name in "ab"]
    found = rounds_of(engines, DECODE, 2)[DECODE]
    for samples in found.values():
        assert samples.turns == [[0.5] * len(DECODE.slices)] * 2
        assert samples.steps == [0.5] * 2 * (DECODE.steps - Staggered.few)
    engines[0].few = DECODE.slices[-1] + workload.UNTIMED  # a whole slice, of one engine alone
    found = rounds_of(engines, DECODE, 2)[DECODE]
    for samples in found.values():
        assert samples.turns == [[0.5] * (len(DECODE.slices) - 1)] * 2


def test_the_headers_are_read_once(monkeypatch):
    """Refusals before an engine and the twin go by the same reading of the same files."""
    read, measured = [], []
    original = checked.read_headers
    monkeypatch.setattr(
        checked, "read_headers", lambda folder: read.append(folder) or original(folder)
    )

    def measure(source, *_):
        measured.append(source)
        raise SettingError("it is measured elsewhere.")

    monkeypatch.setattr(command, "measure", measure)
    assert main(["bench", str(DEMO), "--quick"]) == 2
    (source,) = measured
    assert read == [source.folder] and source.headers and source.parsed.spec is not None


def test_a_batch_that_does_not_run_together_is_refused():
    engines = [Asked(name, [], [1.0]) for name in "ab"]
    for other in engines:
        other.begin = lambda prompts, max_tokens, own=other: Asked.begin(
            own, prompts[:4], max_tokens
        )
    with pytest.raises(SettingError, match=r"fewer than half of the steps \(4 at most\)"):
        rounds_of(engines, DECODE, 1)


def test_engines_decode_slice_by_slice_in_turn():
    """A machine that slows down within a round slows the engines alike."""
    said: list = []
    engines = [Asked(name, said, [1.0]) for name in "ab"]
    rounds_of(engines, DECODE, 1)
    slices = [name for name, prompts in said if prompts is None]
    assert len(slices) == (1 + measure.DISCARDED) * 2 * len(DECODE.slices)
    assert "".join(slices[:8]) == "abbabaab"


class Crowded:
    """An engine of vLLM's with room for one prompt: the others wait until that one has ended."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def add_request(self, number: str, request: dict, params: Any) -> None:
        self.left[number] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        number = next(iter(self.left))
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
        return [SimpleNamespace(request_id=number, outputs=[SimpleNamespace(token_ids=[1])])]


def test_prompts_that_waited_end_before_the_next_begin():
    bench = object.__new__(Bench)
    bench.engine, bench.number, bench.due = Crowded(), 0, 0
    bench.begin([[1], [2]], 3)
    assert bench.decode(most=1) == {"steps": [pytest.approx(0, abs=1)], "running": [1]}
    assert bench.engine.left
    assert len(bench.begin([[3]], 2)["first"]) == 1
    assert list(bench.engine.left) == ["3"] and bench.decode()["running"] == [1]


@pytest.mark.parametrize("steps", range(1, 70))
def test_every_step_is_in_a_slice(steps):
    cell = replace(DECODE, steps=steps)
    assert sum(cell.slices) == steps
    assert max(cell.slices) <= workload.SLICE and max(cell.slices) - min(cell.slices) <= 1
    assert cell.max_tokens == 1 + steps + len(cell.slices) * workload.UNTIMED


def test_a_person_can_read_it():
    shown = report.render(document(1.021, 1.021, 1.021, 1.022))
    for words in (
        "demo: house on llama",
        "1.021 (1.020 to 1.022)",
        "decode, batch 8, context 64",
        "AttnRes takes",
        "4 of every engine, each in a new process",
    ):
        assert words in shown
    assert "No evidence" not in shown and "eager" not in shown


def test_the_verdict_says_how_far_to_trust_it():
    single = report.render(document(1.021))
    assert "started once" in single and "No evidence" in single
    assert "takes 1.02 (1.02 to 1.02) times" in single and "1.021" not in single
    made = document(1.021, 1.022)
    one = made["overhead"]["attnres"]
    assert "control, a second baseline, takes" in report.render(
        made | {"overhead": {"attnres": one, "control": one}}
    )
    ended = report.render(made | {"ended_by": "budget"})
    assert "no room for more than 2 starts (1.0 minutes)" in ended
    assert "many operators" in report.render(document(1.021, 1.022, compiled=False))
    other = {"baseline": "twin", "baseline_differs_in": ["num_hidden_layers"]}
    shown = report.render(document(1.021, **other))
    assert "twin, in stock vLLM; ANOTHER SHAPE: it differs in num_hidden_layers" in shown


def test_a_baseline_of_another_shape_is_told(tmp_path):
    config = json.loads((GOLDENS / "fla_transformer_block" / "config.json").read_text())
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    plain["vocab_size"] = config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    source = read(str(GOLDENS / "fla_transformer_block"), has_weights=False)
    assert read_other(str(tmp_path)).differs_from(source.parsed) == ["hidden_size"]


def test_a_document_names_no_path_and_no_secret():
    words = ["--hf-token", "abc", "--hf_token=abc", "--header", "A=b", "C=d", "--model=/home/x/m"]
    assert machine.shown([*words, "/home/x", "8"]) == [
        "--hf-token", "***", "--hf_token=***", "--header", "***", "***", "--model=m", "x", "8"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--max_model_len=9_0", "--max-model-len=9_0"),
        ("--hf_overrides.rope_theta=1e_6", "--hf-overrides.rope_theta=1e_6"),
        ("--compilation-config.use_inductor", "--compilation-config.use_inductor"),
        ("a_b", "a_b"),
        ("-tp=2", "-tp=2"),
    ],
)
def test_a_flag_is_spelt_as_vllm_spells_it(word, expected):
    assert usual(word) == expected


# Over HTTP.


def over_http(
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    served: float = inf,
    contexts: tuple[str, ...] = ("16",),
) -> tuple[dict[str, Any], list[list[str]]]:
    """The document of a run against a server that answers at once, and what its client was told."""
    asked: list[list[str]] = []

    def answer(words: list[str]) -> dict[str, Any]:
        asked.append(words)
        told = dict(word.removeprefix("--").partition("=")[::2] for word in words)
        number = int(told["num-prompts"])
        found = {"completed": number, "failed": 0, "duration": 2.0, "output_throughput": 3.0}
        found["total_input_tokens"] = number * int(told["random-input-len"])
        return found | {
            f"p{percent}_{metric}_ms": 0.0 if metric != "ttft" else 5.0
            for metric in ("ttft", "tpot", "itl")
            for percent in workload.PERCENTILES
        }

    monkeypatch.setattr(bench_client, "ask_over_http", answer)
    monkeypatch.setattr(
        server, "check_there", lambda url, model, flags: server.Served("demo", served)
    )
    shape = ["--prompt-lengths", "32", "--batches", "2"]
    shape += ["--contexts", *contexts] if contexts else []
    assert main(["bench", str(DEMO), "--http", "http://x", *shape, "--header", "A=b"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1]), asked


OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", r"no server answers at http://127.0.0.1:\d+ \(.*\)\. Is it up\? Start one with"),
        (OK + b"<html>", "/v1/models does not answer with a list of models; expected an OpenAI-co"),
        (OK + b"[]", "/v1/models does not answer with a list of models"),
        (OK + b'{"data": []}', "/v1/models does not answer with a list of models"),
        (OK + b'{"data": [{"id": "a"}]}', r"has no model demo; it has a\. Correct --model"),
        (OK + b'{"data": [{"id": "demo"}]}', inf),
        (OK + b'{"data": [{"id": "demo", "max_model_len": 99}]}', 99),
        (b"HTTP/1.0 401 No\r\n\r\n", r"asks for a key \(status 401\) .* OPENAI_API_KEY\.$"),
        (b"HTTP/1.0 404 No\r\n\r\n", r"/v1/models is not there .* its address alone"),
        (b"HTTP/1.0 503 No\r\n\r\n", "answers with status 503; look into its log"),
    ],
)
def test_a_server_that_cannot_be_asked_is_one_sentence(answer, expected, monkeypatch):
    """Any other says how long a sequence may be, or not."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    refused = isinstance(expected, str)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def serve() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SettingError, match=expected) if refused else nullcontext():
            assert server.check_there(url, "demo") == ("demo", expected)
        thread.join()
    with pytest.raises(SettingError, match=r"no server answers at .*refused\)\. Is it up"):
        server.check_there(url, None)


@contextmanager
def asked_for_a_key(key: str):
    """The address of a server that lists its models to those who have a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            knows = self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if knows else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "demo"}]}' if knows else b"")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/"
        finally:
            listening.shutdown()


def test_a_key_is_asked_for_and_taken(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with asked_for_a_key("right") as url:
        with pytest.raises(SettingError, match=r"asks for a key .* and none is given; set the var"):
            server.check_there(url, None)
        for flags in (["--header", "x=y", "Authorization=Bearer right"], []):
            if not flags:
                monkeypatch.setenv("OPENAI_API_KEY", "right")
            assert server.check_there(url, None, flags) == ("demo", inf)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(SettingError, match=r"refuses the key \(status 401\); correct it"):
            server.check_there(url, None)


def test_the_client_is_told_the_model_that_the_key_opens(monkeypatch, capsys):
    """vLLM's client asks for the first one without the key."""
    _, asked = over_http(monkeypatch, capsys)
    assert asked and all("--model=demo" in words for words in asked)


@pytest.mark.parametrize("below", ["", "v1", "v1/", "attn_res", "v1/attn_res/trace"])
def test_a_server_on_this_machine_is_asked_past_a_proxy(below, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    with asked_for_a_key("right") as url:
        assert server.check_there(f"{url}{below}", None) == ("demo", inf)


@pytest.mark.parametrize(
    "words",
    [
        ["--http", "http://127.0.0.1:9"],  # nobody listens there
        ["--http", "127.0.0.1:8000"],
        ["--max-modle-len", "9"],
    ],
)
def test_a_mistake_costs_no_heavy_import(words):
    """A sentence and the exit status, before torch and vLLM are imported."""
    script = (
        "import sys\nfrom attnres_serve.cli import main\nstatus = main(sys.argv[1:])\n"
        "print(status, sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, "bench", str(DEMO), *words]
    found = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert found.stdout == "2 []\n"
    assert found.stderr.startswith("attnres-serve: ") and found.stderr.count("\n") == 1


def test_a_flag_that_the_client_does_not_know_is_one_sentence(capsys):
    with pytest.raises(SettingError, match=r"^unrecognized arguments: --foo; with --http, flags"):
        bench_client.ask_over_http(["--foo"])
    assert "usage" not in capsys.readouterr().err


def test_no_prompt_reaches_a_server_twice(monkeypatch, capsys):
    """In no two runs, and the client's warm-up, which is its first prompt, is not used."""
    (document, first), (_, second) = (over_http(monkeypatch, capsys) for _ in range(2))
    seeds = [word for words in first + second for word in words if word.startswith("--seed=")]
    assert len(set(seeds)) == len(seeds) == 8  # two cells, each with a warm-up, in two runs
    for warm, timed in (first[:2], first[2:]):
        assert "--num-warmups=0" in warm and "--num-warmups=0" in timed
        assert "--ready-check-timeout-sec=0" in timed  # it would be the first prompt, too
    recorded = [f"--seed={row['seed']}" for row in document["cells"]]
    assert [recorded[0] in first[1], recorded[1] in first[3]] == [True, True]


@pytest.mark.parametrize(("served", "most"), [(90, 85), (100, 94), (128, 120)])
def test_a_decode_over_http_is_as_long_as_the_server_allows(served, most, monkeypatch, capsys):
    """Its answers are those that engines here would give.

    The client's texts had up to 130 tokens where 128 were asked for, so some room is left.
    """
    document, words = over_http(monkeypatch, capsys, served=served, contexts=())
    _, decode = document["cells"]
    length = Cell("decode", 2, decode["context"], workload.STEPS).max_tokens
    assert decode["context"] + length == most and decode["steps"] == length - 1
    assert f"--random-output-len={length}" in words[-1]
    assert f"{decode['context']} + {1 + decode['steps']} tokens, 2 at a time" in http.render(
        document
    )


def test_over_http_prefill_counts_prompt_tokens_and_has_no_time_between_tokens(monkeypatch, capsys):
    document, _ = over_http(monkeypatch, capsys)
    prefill, decode = document["cells"]
    assert prefill["prompt_tokens_per_s"] == http.REQUESTS * 32 / 2.0
    assert prefill["tpot_s"] is None and prefill["itl_s"] is None
    assert decode["itl_s"] is not None and prefill["ttft_s"]["p50"] == 0.005
    assert document["flags"] == ["--header", "***"]


# The whole.


def bench(*words: str) -> dict[str, Any]:
    """Run the command; its document, which fits the schema."""
    found = json.loads(run_module("attnres_serve", "bench", *words, timeout=1200).splitlines()[-1])
    documents.Document.model_validate(found)
    words_of = [word for word in json.dumps(found).replace('"', " ").split() if len(word) > 1]
    assert not [word for word in words_of if word.startswith("/")], "a path of this machine"
    return found


SHORT = ("--quick", "--prompt-lengths", "32", "--batches", "2", "--contexts", "16", "--steps", "4")


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("golden", "algorithm"),
    [
        ("fla_transformer_block", "two_phase"),
        ("qwen3_attnres_full", "single_pass"),
    ],
)
def test_a_golden_is_measured_against_its_twin(golden, algorithm, tmp_path):
    out = tmp_path / "out.json"
    ours = ("--attnres-algorithm", algorithm, "--out", str(out))
    found = bench(str(GOLDENS / golden), *SHORT, *ours)
    assert json.loads(out.read_text()) == found
    engines = found["engines"]
    assert not engines["baseline"]["architecture"].startswith("AttnRes")
    assert engines["attnres"]["architecture"].startswith("AttnRes")
    ran = {name for name, ways in engines["attnres"]["executed"].items() if ways["compiled"]}
    assert ran == {algorithm}


@pytest.mark.engine
@pytest.mark.exhaustive
def test_every_engine_loads_what_an_earlier_start_compiled(tmp_path):
    """Stock vLLM, too, or its ratio would be one of other code."""
    golden = GOLDENS / "fla_transformer_block"
    write_twin(read(str(golden), has_weights=True), tmp_path / "twin")
    flags = ("--max-model-len=64",)
    for contender in (
        process.stock("stock", tmp_path / "twin", flags),
        process.attnres("attnres", golden, flags, {}),
    ):
        for again in (False, True):
            log = tmp_path / f"{contender.name}.log"
            with process.running(contender, log, tmp_path / contender.name, 2) as engine:
                assert engine.at_start["compiled"] and engine.at_start["code_loaded"] == again


@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_zero_query_conversion_is_measured(tmp_path):
    write_twin(read(str(DEMO), has_weights=True), tmp_path / "plain")
    made = tmp_path / "zero"
    added = ("--add-zero-queries", "--block-size", "4")
    assert main(["convert", str(tmp_path / "plain"), str(made), *added]) == 0
    found = bench(str(made), *SHORT, "--control", "--baseline", str(tmp_path / "plain"))
    assert found["overhead"].keys() == {"attnres", "control"}
    assert found["config"]["baseline"] == "plain"


@pytest.mark.parametrize("ratios", [[1.02], [1.02, 1.025], [1.02] * 4], ids=len)
def test_a_report_has_80_columns_and_begins_with_the_ratio(ratios: list[float]) -> None:
    shown = report.fitted(report.render(document(*ratios)))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "AttnRes takes 1.02" in lines[0]
    table = next(line for line in lines if line.startswith("ratio"))
    assert lines[lines.index(table) + 1].startswith("1.02")
    assert ("p99" in shown) == (len(ratios) > 1)


@pytest.mark.parametrize(
    ("words", "terminal", "has_table", "has_json"),
    [([], True, True, False), ([], False, True, True), (["--json"], True, False, True)],
)
def test_json_is_printed_where_it_is_asked_for(
    words: list, terminal: bool, has_table: bool, has_json: bool, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(command, "measure", lambda *_: document(1.02))
    assert main(["bench", str(DEMO), "--quick", *words]) == 0
    out = capsys.readouterr().out
    assert ("ratio  95 % interval" in out) == has_table
    assert out.splitlines()[-1].startswith("{") == has_json
