"""``attnres-serve bench``: its statistics, its baseline, what it refuses, and its document."""

import itertools
import json
import mmap
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

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from serving import DEMO, GOLDENS, run_module

import attnres_serve.bench
from attnres_serve.bench import (
    baseline,
    breakdown,
    busy,
    command,
    http,
    machine,
    measure,
    memory,
    plot,
    process,
    report,
    server,
    session,
    workload,
)
from attnres_serve.bench.baseline import read, read_other, twin_config, write_twin
from attnres_serve.bench.budget import Budget
from attnres_serve.bench.engine import Bench
from attnres_serve.bench.length import NARROW, TRIAL, USUAL, Length, Until, length_of
from attnres_serve.bench.measure import Samples
from attnres_serve.bench.overhead import overheads
from attnres_serve.bench.ratios import (
    geometric_mean,
    interval,
    mean_interval,
    median_interval,
    paired_ratios,
    student,
)
from attnres_serve.bench.session import Outcome
from attnres_serve.bench.workload import Cell, draw_prompts, make_cells
from attnres_serve.checkpoints import checked
from attnres_serve.cli import main
from attnres_serve.compat import bench_client
from attnres_serve.compat.workarounds import malloc
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.flags import usual
from attnres_serve.formats.resolve import resolve
from attnres_serve.kernels import traffic

FOLDER = Path(attnres_serve.bench.__file__).parent
SCHEMA, HTTP_SCHEMA = (
    json.loads((FOLDER / name).read_text()) for name in ("schema.json", "schema_http.json")
)
PREFILL, DECODE = Cell("prefill", 1, 128, 0), Cell("decode", 8, 64, 16)


# Statistics.


def noisy(rng: np.random.Generator, ratio: float, rounds: int = 15) -> tuple[list, list]:
    """Times of two engines, log-normal noise of 3 %, on a machine that slows down threefold."""
    drift = np.linspace(1, 3, rounds)
    noise = np.exp(0.03 * rng.standard_normal((2, rounds)))
    return (ratio * drift * noise[0]).tolist(), (drift * noise[1]).tolist()


def test_the_interval_covers_a_known_ratio_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        ratios = paired_ratios(*noisy(rng, 1.05))
        low, high = median_interval(ratios, resamples=1000)
        covered.append(low <= 1.05 <= high)
        assert low <= median(ratios) <= high
        assert high - low < 0.15  # the drift, common to both, does not widen it
    # The percentile interval of a median of 15 covers 92 to 97 %; three standard errors around it.
    assert 0.88 < np.mean(covered) < 0.995


def test_an_interval_narrows_with_rounds_and_is_reproducible():
    rng = np.random.default_rng(2)
    few, many = (paired_ratios(*noisy(rng, 1.0, rounds)) for rounds in (15, 400))
    assert np.ptp(median_interval(many)) < np.ptp(median_interval(few)) / 2
    assert median_interval(few) == median_interval(few)
    assert median_interval([1.5] * 5) == (1.5, 1.5)


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
    assert np.log(mean_interval([1.01, 1.03, 1.02])) == pytest.approx(
        [middle - reach, middle + reach]
    )
    hiccups = [[1.01, 1.01, 9.0], [0.1, 1.03, 1.03], [1.02, 1.02, 1.02]]
    assert interval(hiccups) == mean_interval([1.01, 1.03, 1.02])
    assert interval(hiccups[:1]) == median_interval(hiccups[0])  # it has no other sample


def to_itself(
    rng: np.random.Generator, luck: float, noise: float, length: Length, freedom: int
) -> list[list[float]]:
    """Ratios of one model to itself: of every round of every start that a measurement has.

    Args:
        rng: what to draw with.
        luck: of a pair of processes, a standard deviation of the log.
        noise: of a round, likewise.
        length: starts and rounds.
        freedom: of the Student's t that luck is: 3 has heavy tails.
    """
    most = length.until.starts if length.until else length.starts
    drawn = rng.standard_t(freedom, (most, 1)) * np.sqrt((freedom - 2) / freedom)
    rounds = rng.standard_normal((most, length.rounds))
    ratios = np.exp(luck * drawn + noise * rounds).tolist()

    def is_enough(made: int) -> bool:
        return length.is_enough(made, lambda: float(np.ptp(interval(ratios[:made])) / 2))

    return ratios[: next(filter(is_enough, itertools.count(1)))]


@pytest.mark.parametrize("freedom", [3, 100])
@pytest.mark.parametrize(
    ("luck", "noise", "typical"),
    [(0.006, 0.017, 8), (0.011, 0.013, 8), (0.021, 0.013, 10), (0.037, 0.013, 24)],
)
def test_the_usual_length_knows_the_luck_of_a_process(luck, noise, typical, freedom):
    """By the noise that decode and prefill had on two machines (768 x 12, eager)."""
    rng = np.random.default_rng(3)

    def found(length: Length, runs: int) -> tuple[np.ndarray, float]:
        drawn = [to_itself(rng, luck, noise, length, freedom) for _ in range(runs)]
        return np.array([interval(starts) for starts in drawn]), median(map(len, drawn))

    usual, starts = found(USUAL, 1000)
    assert 0.915 < contains_1(usual) < 0.98  # 93 to 96 %, and two standard errors
    assert np.mean(np.ptp(usual, axis=1) / 2 <= NARROW) > 0.8
    assert starts <= typical + 2
    assert contains_1(found(Length(1, 20), 100)[0]) < 0.9, "one start knows it too"


def contains_1(intervals: np.ndarray) -> float:
    return float(np.mean((intervals[:, 0] <= 1) & (intervals[:, 1] >= 1)))


def test_a_length_is_what_was_asked_for_or_usual():
    assert length_of(None, None, USUAL) == USUAL
    assert length_of(None, None, TRIAL) == TRIAL
    assert length_of(3, None, USUAL) == Length(3, USUAL.rounds)  # and no more
    assert length_of(None, 9, USUAL) == replace(USUAL, rounds=9)
    assert length_of(1, None, USUAL) == Length(1, 20)
    assert length_of(2, 1, TRIAL) == Length(2, 1)


@pytest.mark.parametrize(("starts", "rounds"), [(0, None), (2, 0), (1, 5)])
def test_a_length_that_has_no_interval_is_refused(starts, rounds):
    with pytest.raises(SettingError, match="expected at least"):
        length_of(starts, rounds, USUAL)


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
    own = SimpleNamespace(**dict.fromkeys(names), http="x", rounds=1, steps=1, baseline="auto")
    source = read(folder, has_weights=True)
    whole = partial(http.measure, folder) if over_http else partial(command.measure, source)
    with pytest.raises(Seen, match=f"^{tokens}$"):
        whole(own, [], *([server.Served("demo", inf)] if over_http else [USUAL, Budget()]))


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
        ("Traceback\nValueError: no\nmore\nRuntimeError: it ended\n  because\n", "ended because"),
        ("", "without a word"),
        ("no error\nThe system says no.\n", "ended .The system says no..;"),
        ("Traceback\nAssertionError\n", "ended .AssertionError.;"),
        (
            "ValueError: no room\nException: WorkerProc failed. See stack trace for root cause.\n",
            "ended .ValueError: no room.;",
        ),
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


def test_workers_bind_their_own_threads(tmp_path):
    parallel = process.Contender("a", ("--tensor-parallel-size=2",))
    found = process.environment(parallel, tmp_path, 2)
    assert found.get("GOMP_CPU_AFFINITY") == os.environ.get("GOMP_CPU_AFFINITY")


# Memory.


def test_free_memory_in_pieces_is_what_linux_says(monkeypatch, tmp_path):
    zones = "DMA 1 0 0 0 0 0 0 0 1 5", "Normal 10 2 0 0 0 0 0 0 0 7"
    (tmp_path / "buddyinfo").write_text("".join(f"Node 0, zone {zone}\n" for zone in zones))
    monkeypatch.setattr(memory, "BUDDIES", tmp_path / "buddyinfo")
    pages = 1 + 256 + 10 + 2 * 2  # those of order 9 are huge
    assert memory.in_pieces() == pages * mmap.PAGESIZE
    monkeypatch.setattr(memory, "BUDDIES", tmp_path / "nothing")
    assert memory.in_pieces() == 0


def test_pieces_are_held_and_given_back(monkeypatch):
    size, process = 200 * 2**20, psutil.Process()
    monkeypatch.setattr(memory, "in_pieces", lambda: size + 5)
    before = process.memory_info().rss
    with memory.pieces_held() as held:
        assert held == size
        assert process.memory_info().rss - before > 0.9 * size
    assert process.memory_info().rss - before < 0.1 * size


def test_an_engines_peak_is_its_own(tmp_path):
    """Not that of the process that started it, while that one holds the pieces."""
    script = tmp_path / "script.py"
    script.write_text("from attnres_serve.bench import engine; print(engine.peak_memory())")
    held = np.ones(2**30, np.uint8)
    own = int(subprocess.check_output([sys.executable, script], cwd=FOLDER.parents[1]))
    assert 2**20 < own < held.size


def test_most_of_the_memory_is_left_alone(monkeypatch):
    """A quarter of what the machine has left, or of what the container may still take."""
    page = mmap.PAGESIZE
    monkeypatch.setattr(memory, "in_pieces", lambda: 2**40)
    for left, held in ((100, 25), (43, 10), (0, 0)):
        monkeypatch.setattr(memory.memory, "left", lambda left=left: left * page)
        with memory.pieces_held() as found:
            assert found == held * page


# Where the time goes.


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("attnres_serve::cpp_single_pass [[2, 192], [2, 5, 192]]", "AttnRes"),
        ("_C::cpu_attn_reshape_and_cache [[2, 2, 64]]", "attention"),
        ("_C::rotary_embedding [[2], [2, 256]]", "attention"),
        ("_C::weight_packed_linear [[2, 512], [2, 192], [512, 192]]", "attention"),
        ("_C::weight_packed_linear [[2, 192], [2, 256], [192, 256]]", "attention"),
        ("_C::weight_packed_linear [[2, 192], [2, 448], [192, 448]]", "MLP"),
        ("aten::mm [[2, 192], [192, 896]]", "MLP"),
        ("aten::silu [[256, 448]]", "MLP"),
        ("graph_0_cpp_fused_mul_silu_slice_weight_packed_linear_3 []", "MLP"),
        ("_C::weight_packed_linear [[2, 2048], [2, 192], [2048, 192]]", "head"),
        ("_C::fused_add_rms_norm [[2, 192]]", "norms"),
        ("attnres_serve::cpp_single_pass [[2, 192], [2, 3, 192]]", "AttnRes"),
        ("attnres_serve::cpp_recurrence [[2, 4, 32]]", "attention"),
        ("aten::empty [[]]", None),
    ],
)
def test_operators_belong_to_parts(operator, part):
    parsed = read(str(DEMO), has_weights=False).parsed
    rules = breakdown.rules(parsed)
    assert next((name for name, rule in rules if re.search(rule, operator)), None) == part


class Profiled(process.Engine):
    """An engine whose generations take the seconds it is given under the profiler."""

    def __init__(self, name: str, walls: list[float], backend: str | None = None) -> None:
        at_start = facts(vocabulary=50, workers=1, backend=backend, algorithm=None)
        super().__init__(process.Contender(name, ()), None, Path(), at_start)
        self.walls, self.asked = list(walls), []

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append((what, arguments["prompts"]))
        if what == "generate":
            return {}
        wall = self.walls.pop(0)
        return {"wall": wall, "seconds": {"attention": wall / 4}}


def test_the_profile_is_the_median_of_generations_and_every_one_has_a_warm_up():
    parsed = read(str(DEMO), has_weights=False).parsed
    engines = [Profiled("a", [9.0, 1.0, 2.0]), Profiled("b", [4.0, 5.0, 6.0])]
    rows = breakdown.measure(engines, [PREFILL], parsed, lambda what: None)
    assert [row["engine"] for row in rows] == ["a", "b"]
    assert rows[0]["milliseconds"] == {"attention": 500.0, "rest": 1500.0}
    ends = {"attention": [250.0, 2250.0], "rest": [750.0, 6750.0]}
    assert rows[0]["range_milliseconds"] == ends
    assert [what for what, _ in engines[0].asked] == ["generate", "profile"] * 3
    assert [asked for asked in engines[0].asked] == [asked for asked in engines[1].asked]


def test_sites_that_are_operators_like_any_other_are_not_told_apart():
    parsed = read(str(DEMO), has_weights=False).parsed
    engines = [Profiled("a", []), Profiled("b", [], backend="torch")]
    assert breakdown.measure(engines, [PREFILL], parsed, lambda what: None) is None


def test_products_that_sizes_do_not_tell_apart_are_one_part():
    parsed = read(str(DEMO), has_weights=False).parsed
    config = parsed.config | {"intermediate_size": 256}  # as attention's heads together
    parts = {name for name, _ in breakdown.rules(replace(parsed, config=config))}
    assert "matrix products" in parts


@pytest.mark.parametrize("full", [False, True])
def test_bytes_of_the_sites_follow_the_formulae(full):
    """Counted by hand, in vectors: what ``docs/measure/bytes.md`` says of a launch."""
    layers, size, hidden, tokens = 8, 1 if full else 4, 192, 512
    spec = AttnResSpec.uniform(Layout.of(layers), size, 1e-6)
    vectors, blocks = 0, 1  # the embedding
    for site in range(1, 2 * layers + 1):
        begins = (site - 1) % size == 0  # a partial sum
        vectors += blocks + (3 if begins else 4)
        blocks += site % size == 0  # which is a block from here on
    expected = vectors * tokens * hidden * 2 + 2 * layers * hidden * 6
    found = breakdown.site_bytes(spec, "single_pass", tokens, hidden, torch.bfloat16, 2048)
    assert found == expected


def test_bytes_of_a_block_are_those_of_its_group():
    spec = AttnResSpec.uniform(Layout.of(12), 8, 1e-6)  # three blocks of eight sublayers
    shape = 64, torch.bfloat16
    found = {
        name: breakdown.site_bytes(spec, name, 32, *shape, 2048)
        for name in ("single_pass", "two_phase")
    }
    assert found["two_phase"] < found["single_pass"]
    third = traffic.block_rows(3, 8)  # what the last whole block would save by one group
    saved = traffic.single_pass_group(32, third, *shape) - traffic.two_phase_group(
        32, third, *shape
    )
    assert found["single_pass"] - found["two_phase"] == pytest.approx(saved, rel=0.2)


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
        ([str(DEMO), "--threads", "4096"], "--threads is 4096; expected at most"),
        ([str(DEMO), "--baseline", "nowhere/at/all"], "nowhere/at/all does not exist"),
        ([str(DEMO), "--baseline", str(DEMO)], "has Attention Residuals (house); expected"),
        ([str(DEMO), "--steps", "5000"], "--steps is 5000"),
        ([str(DEMO), "--starts", "0"], "--starts is 0; expected at least 1."),
        ([str(DEMO), "--rounds", "0"], "--rounds is 0; expected at least 1."),
        ([str(DEMO), "--starts=1", "--rounds=5"], "--rounds is 5; expected at least 6 with one"),
        ([str(DEMO), "--additional-config", "{}"], "--additional-config would be ours in one"),
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
        ([str(DEMO), "--http", "http://x", "--profile"], "--profile does not go with --http"),
        ([str(DEMO), "--http", "http://x", "--budget", "2"], "--budget does not go with --http"),
        ([str(DEMO), "--budget", "-1"], "--budget is -1; expected a number of minutes above 0."),
        ([str(DEMO), "--http", "http://x", "--plot", "x"], "--plot does not go with --http"),
        ([str(DEMO), "--http", "http://x", "--starts", "2"], "--starts does not go with --http"),
        ([str(DEMO), "--http", "http://x", "--baseline", "y"], "--baseline does not go with"),
        ([str(DEMO), "-tp=2", "--threads", "2"], "--threads is for one worker"),
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
    results: list[measure.Results] = []
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
    shares = [
        {
            "phase": cell.phase,
            "batch": cell.batch,
            "context": cell.context,
            "steps": cell.max_tokens - 1,
            "engine": name,
            "milliseconds": {"attention": 1.0, "MLP": 2.0, "AttnRes": 0.1, "rest": 0.5},
            "range_milliseconds": {"attention": [0.9, 1.1]},
            "site_bytes": 10**6 if name == "attnres" else None,
        }
        for cell in (PREFILL, DECODE)
        for name in ("baseline", "attnres")
    ]
    engines = {"baseline": facts_of, "attnres": facts_of}
    return Outcome(engines, results, shares, session.STARTS, 60.0)


def document(*ratios: float) -> dict[str, Any]:
    """The document of a run with a start for every ratio."""
    found = outcome(*ratios)
    parsed = read(str(DEMO), has_weights=False).parsed
    config = {"checkpoint": "demo", "baseline": "auto", "weights": "checkpoint", "flags": []}
    config["baseline_differs_in"] = []
    config |= report.model(parsed) | {"algorithm": "single_pass", "backend": "cpp"}
    config |= {"dtype": "bfloat16", "compiled": True, "threads": 2}
    config |= Length(len(ratios), 9).told(len(ratios)) | {"profile": True}
    return {
        "command": "attnres-serve bench demo",
        "benchmark": "bench",
        "quick": False,
        "versions": {"vllm": "0"},
        "hardware": {"cpu": "C", "cores": 2, "memory_gib": 8.0},
        "config": config | {"discarded_rounds": 2, "procedure": measure.PROCEDURE},
        "end": report.end(found, Budget(), "baseline"),
        "trust": None,
        **report.content(found, "baseline"),
        "overhead": overheads(found.results, "attnres", "baseline"),
        "control": None,
    }


def test_a_known_ratio_is_reported():
    for phase in ("prefill", "decode"):
        found = document(1.05)["overhead"][phase]
        assert found["ratio"] == pytest.approx(1.05)
        assert found["ci95"] == pytest.approx([1.05, 1.05])
        assert not found["includes_1"]
    assert document(1.0)["overhead"]["decode"]["includes_1"]


def test_the_figures_follow_from_the_rounds():
    made = document(1.02, 1.03, 1.04)
    jsonschema.validate(made, SCHEMA)
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
        assert ours["ci95"] == pytest.approx(mean_interval(each))
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
    assert found["ci95"] == pytest.approx(mean_interval(starts))
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


def rounds_of(engines: list[Asked], cell: Cell, rounds: int, start: int = 0) -> measure.Results:
    """What some rounds of a start found."""
    asked = measure.measure(engines, [cell], rounds, start, lambda what: None)
    return next(itertools.islice(asked, rounds - 1, None))


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

    @contextmanager
    def pieces_held():
        events.append(("holds", "memory"))
        yield

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(session, "pieces_held", pieces_held)
    contenders = [process.Contender(name, ()) for name in ("baseline", "other")]
    found = session.run(contenders, [PREFILL], Length(4, 2), 1, None)
    started = [name[0] for what, name in events if what == "starts"]
    assert "".join(started) == "boobobbo"
    assert [what for what, _ in events] == 4 * ["holds", "starts", "starts", "ends", "ends"]
    assert all(len(folders) == 1 for folders in compiled.values()), "compiled code is not kept"
    assert compiled["baseline"] != compiled["other"]
    assert [start[PREFILL]["other"].rounds for start in found.results] == 4 * [[2.0, 2.0]]
    assert list(found.engines) == ["baseline", "other"] and found.breakdown is None
    turns = 4 * (2 + measure.DISCARDED) * PREFILL.turns
    assert len({str(prompts) for _, prompts in said}) == turns, "a prompt came twice"
    assert found.engines["other"]["start_s"] == len(said) / 4, "not of the first start"


@pytest.mark.parametrize(
    ("ratios", "starts"),
    [
        ([1.02], 4),  # known at once
        ([1.0, 1.1], 12),  # never
        ([1.0, 1.1, 1.05], 12),
        ([1.0, 1.03, *[1.015] * 10], 6),  # after five, too, which is odd
    ],
)
def test_there_are_more_starts_until_the_ratios_are_known(ratios, starts, monkeypatch):
    length = Length(4, 1, Until(NARROW, 12))
    times = {"baseline": itertools.repeat(1.0), "other": itertools.cycle(ratios)}

    @contextmanager
    def running(contender: process.Contender, *_):
        yield Started(contender.name, [], [next(times[contender.name])])

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(session, "pieces_held", nullcontext)
    contenders = [process.Contender(name, ()) for name in times]
    found = session.run(contenders, [PREFILL, DECODE], length, 1, None)
    assert len(found.results) == starts
    found_ratio = overheads(found.results, "other", "baseline")["prefill"]
    assert (np.ptp(found_ratio["ci95"]) / 2 <= NARROW) == (starts < 12)
    told = length.told(starts)
    assert (told["starts"], told["until"]) == (starts, {"half_width": NARROW, "starts": 12})


@pytest.mark.parametrize("number", [2, 3, 4])
def test_no_engine_is_asked_first_more_often(number):
    """Over the usual starts, of the rounds that count; a start of three has half of the orders."""
    asked: dict[str, list[str]] = {"begin": [], "decode": []}
    for start in range(USUAL.starts):
        said: list = []
        engines = [Asked(name, said, [1.0]) for name in "abcd"[:number]]
        rounds_of(engines, DECODE, USUAL.rounds, start)
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
        assert all(abs(count - len(turns) / 2) <= 1 for count in before.values()), (what, before)


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
    shown = report.render(document(1.02))
    for words in (
        "demo: house on llama",
        "1.020 (1.020 to 1.020)",
        "decode, batch 8, context 64",
        "sites move 1.0 MB",
        "AttnRes takes",
    ):
        assert words in shown


def test_the_verdict_says_how_far_to_trust_it():
    shown = report.render(document(1.02))
    assert "they do not know the luck of a process" in shown and "trial" not in shown
    assert "one of every engine, so the luck of a process is not known" in shown
    several = report.render(document(1.02, 1.03))
    assert "2 of every engine, each in a new process" in several
    assert "do not know" not in several and "is not known" not in several
    made = document(1.02)
    assert "1.020 (1.020 to 1.020)" in report.render(made | {"control": made["overhead"]})
    assert "control, a second baseline, takes" in report.render(
        made | {"control": made["overhead"]}
    )
    assert "A trial, no evidence: AttnRes takes" in report.render(made | {"quick": True})
    assert "is the aim" not in several
    other = {"baseline": "twin", "baseline_differs_in": ["num_hidden_layers"]}
    shown = report.render(made | {"config": made["config"] | other})
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
    shape = ["--prompt-lengths", "32", "--batches", "2", "--rounds", "6"]
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


def test_a_decode_over_http_is_as_long_as_the_server_allows(monkeypatch, capsys):
    """And its answers are those that engines here would give."""
    document, words = over_http(monkeypatch, capsys, served=100, contexts=())
    _, decode = document["cells"]
    length = Cell("decode", 2, decode["context"], workload.STEPS).max_tokens
    assert decode["context"] + length == 100 and decode["steps"] == length - 1
    assert f"--random-output-len={length}" in words[-1]
    assert f"{decode['context']} + {1 + decode['steps']} tokens, 2 at a time" in http.render(
        document
    )


def test_over_http_prefill_counts_prompt_tokens_and_has_no_time_between_tokens(monkeypatch, capsys):
    document, _ = over_http(monkeypatch, capsys)
    jsonschema.validate(document, HTTP_SCHEMA)
    prefill, decode = document["cells"]
    assert prefill["prompt_tokens_per_s"] == 6 * 32 / 2.0
    assert prefill["tpot_s"] is None and prefill["itl_s"] is None
    assert decode["itl_s"] is not None and prefill["ttft_s"]["p50"] == 0.005
    assert document["config"]["flags"] == ["--header", "***"]


def test_the_picture_is_drawn_as_png_and_svg(tmp_path):
    plot.draw(document(1.02), tmp_path / "v1.5")
    assert (tmp_path / "v1.5.png").is_file() and (tmp_path / "v1.5.svg").is_file()
    plot.draw(document(1.02), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "cost.svg").read_text()
    with pytest.raises(SettingError, match="cannot be written"):
        plot.draw(document(1.02), tmp_path / "nowhere" / "cost.png")


def with_control(made: dict[str, Any]) -> dict[str, Any]:
    """The document with a control, whose figures are those of the model."""
    for row in made["cells"]:
        row["engines"]["control"] = row["engines"]["attnres"]
    shares = [row | {"engine": "control"} for row in made["breakdown"] if row["site_bytes"]]
    breakdown = made["breakdown"] + shares
    return made | {"control": made["overhead"], "breakdown": breakdown}


@pytest.mark.parametrize("name", ["demo", "organisation--a-model-with-a-long-name-" * 3])
@pytest.mark.parametrize("kind", ["profile", "ratios", "control", "busy"])
@pytest.mark.parametrize("many", [False, True])
def test_nothing_of_the_picture_is_cut_off(name, kind, many, tmp_path):
    """The edges of the picture are white: whatever goes beyond them has ink there."""
    made = document(1.02, 1.05)
    made["config"] |= {"checkpoint": name, "algorithm": "single_pass"}
    if many:
        long = [row | {"batch": 4096, "context": 131072} for row in made["cells"]]
        made["cells"] += long * 3
        long = [row | {"batch": 4096, "context": 131072} for row in made["breakdown"]]
        made["breakdown"] += long * 3
    if kind == "control":
        made = with_control(made)
    if kind in ("ratios", "busy"):
        made["breakdown"] = None
    if kind == "busy":
        made = busy.judge(made | {"quick": True}, 0.9)
    plot.draw(made, tmp_path / "cost")
    pixels = np.asarray(Image.open(tmp_path / "cost.png").convert("L"))
    assert pixels.min() < 50, "nothing is drawn"
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert edge.min() == 255


# The whole.


def bench(*words: str) -> dict[str, Any]:
    """Run the command; its document, which fits the schema."""
    found = json.loads(run_module("attnres_serve", "bench", *words, timeout=1200).splitlines()[-1])
    jsonschema.validate(found, SCHEMA)
    words_of = [word for word in json.dumps(found).replace('"', " ").split() if len(word) > 1]
    assert not [word for word in words_of if word.startswith("/")], "a path of this machine"
    return found


SHORT = ("--quick", "--prompt-lengths", "32", "--contexts", "16", "--steps", "4", "--rounds", "6")
SHORT += ("--threads", "1")  # two would wait for each other beside another test


@pytest.mark.engine
@pytest.mark.versions
@pytest.mark.parametrize(
    ("golden", "algorithm"),
    [
        ("fla_transformer_block", "two_phase"),
        pytest.param("qwen3_attnres_full", "single_pass", marks=pytest.mark.exhaustive),
    ],
)
def test_a_golden_is_measured_against_its_twin(golden, algorithm, tmp_path):
    out = tmp_path / "out.json"
    ours = ("--attnres-algorithm", algorithm, "--out", str(out), "--plot", str(tmp_path / "cost"))
    found = bench(str(GOLDENS / golden), *SHORT, *ours)
    assert json.loads(out.read_text()) == found
    assert (tmp_path / "cost.svg").is_file()
    engines = found["engines"]
    assert not engines["baseline"]["architecture"].startswith("AttnRes")
    assert engines["attnres"]["architecture"].startswith("AttnRes")
    ran = {name for name, ways in engines["attnres"]["executed"].items() if ways["eager"]}
    assert ran == {algorithm}


@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_profile_tells_the_sites_from_the_rest():
    found = bench(str(GOLDENS / "fla_transformer_block"), *SHORT, "--profile")
    shares = [row for row in found["breakdown"] if row["engine"] == "attnres"]
    assert all(row["milliseconds"]["AttnRes"] > 0 for row in shares)
    others = [row for row in found["breakdown"] if row["engine"] == "baseline"]
    assert all(row["milliseconds"]["AttnRes"] == 0 for row in others)


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
    assert found["control"] is not None
    assert found["config"]["baseline"] == "plain"


@pytest.mark.parametrize("change", [{}, {"quick": True}, {"control": None}], ids=str)
def test_a_report_has_80_columns_and_begins_with_the_ratio(change: dict) -> None:
    shown = report.fitted(report.render(document(1.02) | change))
    lines = shown.splitlines()
    breakdown = shown.index("milliseconds under the profiler")
    assert max(map(len, shown[:breakdown].splitlines())) <= 80
    assert "AttnRes takes 1.02" in lines[0]
    table = next(line for line in lines if line.startswith("ratio"))
    assert lines[lines.index(table) + 1].startswith("1.02")
    is_trial = change.get("quick", False)
    assert ("p99" in shown) != is_trial and ("1.020" in shown) != is_trial


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
