"""The benchmark of the kernels without a GPU: its gate, on ours and on planted mistakes, and
everything it does before and after the clock."""

import importlib.util
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor
from triton_interpreter import ON_GPU

from attnres_serve.kernels import reference
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import cells as kernel_cells
from benchmarks.kernels import contenders as kernel_contenders
from benchmarks.kernels import gate as kernel_gate
from benchmarks.kernels import peers as kernel_peers
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels import timing as kernel_timing
from benchmarks.kernels import traffic
from benchmarks.kernels.cells import KEY_EPS, NORM_EPS, Cell, Inputs
from benchmarks.kernels.contenders import BASELINE, CONTENDERS, Contender, Run

DEVICE = "cuda" if ON_GPU else "cpu"
OURS = {name: one for name, one in CONTENDERS.items() if one.ours}
CELLS = (*kernel_cells.TINY, Cell(2, 2, 33, 2))


def gate(cell: Cell, contenders: dict[str, Contender], dtype: torch.dtype = torch.float32):
    return kernels.examine_cell(cell, contenders, DEVICE, dtype)


# The gate on kernels.


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [*zip(CELLS[1:], (torch.float32, torch.float16, torch.bfloat16), strict=True)],
)
def test_ours_pass_again_and_again(cell, dtype):
    """A second pass is after ``reset``: what is timed works on the same sources in every round."""
    inputs = kernel_cells.draw(cell, DEVICE, dtype)
    runs = {name: contender.start(inputs) for name, contender in OURS.items()}
    errors, failures = kernel_gate.examine(inputs, runs, OURS)
    assert not failures and errors.keys() == OURS.keys()
    assert 0 < max(errors.values()) <= 1
    assert kernel_gate.examine(inputs, runs, OURS) == (errors, {})


@pytest.mark.usefixtures("interpreter")
def test_vllm_from_its_file_passes_and_leaves_no_module_behind():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    file = Path(spec.origin).parent / "models/kimi_k3/nvidia/ops/attn_res.py"
    if not file.is_file():
        pytest.skip("this vLLM has no Kimi K3")
    before = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    peers, sources, _ = kernel_peers.find(file)
    vllm = {"vllm_kimi_k3": peers["vllm_kimi_k3"]}
    for cell in kernel_cells.TINY:
        _, errors, failures = gate(cell, vllm)
        assert not failures and 0 < errors["vllm_kimi_k3"] <= 1
    assert sources["vllm_kimi_k3"] == "the file attn_res.py"
    after = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    assert after == before


# The gate on planted mistakes, in plain torch.


def plain(inputs: Inputs, mistake: str = "") -> Run:
    """The reference as a contender, with one thing wrong."""
    blocks = [block.clone() for block in inputs.blocks]
    own = [blocks[-1]]

    def site(index: int) -> Tensor:
        delta = inputs.deltas[index]
        if index == 1:
            blocks[-1], own[0] = own[0], None
        sources = blocks[:-1] if index == 0 else list(blocks)
        if mistake == "a source forgotten" and index == 2:
            sources = sources[1:]
        if mistake == "it raises" and index == 1:
            raise RuntimeError("out of resources\nlong story")
        before = own[0]
        result, own[0] = reference.site(
            delta, before, sources, inputs.queries[index], inputs.norm_weight, KEY_EPS, NORM_EPS
        )
        if mistake == "an element unwritten" and index == 1:
            result[-1, -1] = torch.nan
        if mistake == "slightly off" and index == 1:
            result *= 1 + 1e-4
        if mistake == "a row too few":
            result = result[:-1]
        if mistake == "the sum not stored" and index == 2:
            own[0] = before
        return result

    def reset() -> None:
        blocks[-1] = inputs.blocks[-1].clone()
        own[0] = blocks[-1]

    return Run([lambda i=i: site(i) for i in range(inputs.cell.sites)], lambda: own[0], reset)


def contender(mistake: str = "") -> Contender:
    return Contender(lambda inputs: plain(inputs, mistake), "single_pass", 0, "nothing")


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("a source forgotten", "site 2 is off by"),
        ("an element unwritten", "site 1 is off by inf"),
        ("slightly off", "site 1 is off by"),
        ("a row too few", "site 0 is off by inf"),
        ("the sum not stored", "the partial sum after site 2 is not the reference's"),
        ("it raises", "site 1 raised RuntimeError: out of resources"),
    ],
)
def test_a_planted_mistake_is_reported_by_name_and_not_timed(mistake, says):
    runs, errors, failures = gate(
        Cell(5, 3, 64, 4), {"right": contender(), "wrong": contender(mistake)}
    )
    assert runs.keys() == errors.keys() == {"right"}
    assert failures.keys() == {"wrong"} and failures["wrong"].startswith(says)
    assert "long story" not in failures["wrong"]


def test_a_contender_that_does_not_start_is_reported():
    def start(inputs: Inputs) -> Run:
        raise ImportError("no module named peer")

    runs, _, failures = gate(CELLS[0], {"peer": replace(contender(), start=start)})
    assert not runs
    assert failures == {"peer": "it does not start: ImportError: no module named peer"}


def test_a_rounding_on_the_way_is_allowed_only_to_those_that_say_so():
    """An answer kept in bf16, as two-phase keeps it, is beyond what the single pass may be off."""
    cell, dtype = Cell(64, 4, 128, 3), torch.bfloat16
    inputs = kernel_cells.draw(cell, "cpu", dtype)
    *_, expected = kernel_gate.expected_sites(inputs, "two_phase")
    answers, sums = reference.phase_1(
        [*inputs.blocks[:-1], inputs.blocks[-1] + inputs.deltas[0]], inputs.queries, KEY_EPS
    )
    own = inputs.deltas[1] + inputs.deltas[2]
    mixed = reference.phase_2(
        answers[2].to(dtype).float(), sums[2], own, inputs.queries[2], KEY_EPS
    )
    result = reference.rms_norm(mixed, inputs.norm_weight, NORM_EPS).to(dtype)
    assert kernel_gate.excess(result, expected, 0) > 1 >= kernel_gate.excess(result, expected, 1)


# The others.


def test_what_torch_compile_is_given_is_right(monkeypatch):
    monkeypatch.setattr(kernel_contenders, "compiled", lambda function: function)
    for cell in CELLS:
        for dtype in (torch.float32, torch.bfloat16):
            _, errors, failures = gate(cell, {BASELINE: CONTENDERS[BASELINE]}, dtype)
            assert not failures and errors[BASELINE] <= 1


# Rounds and statistics.


def test_contenders_run_in_turn_each_after_its_reset():
    """And each is the first one in every second round."""
    said: list[str] = []

    def call(name: str) -> list[float]:
        said.append(name)
        return [float(len(said))]

    samples = kernel_timing.in_turn(
        {name: lambda name=name: call(name) for name in "ab"},
        {name: lambda name=name: said.append(f"reset {name}") for name in "ab"},
        rounds=3,
    )
    turns = ["reset a", "a", "reset b", "b"]
    assert said == (turns + turns[2:] + turns[:2]) * (kernel_timing.DISCARDED + 3 >> 1)
    assert {len(times) for times in samples.values()} == {3}
    assert min(samples["a"][0][0], samples["b"][0][0]) > 4 * kernel_timing.DISCARDED


SAMPLES = {
    BASELINE: [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]],
    "single_pass": [[4.0, 3.0, 5.0, 8.0], [8.0, 6.0, 10.0, 16.0], [4.0, 3.0, 6.0, 7.0]],
    "two_phase": [[7.0, 1.0, 1.0, 1.0], [14.0, 2.0, 2.0, 2.0], [7.0, 1.0, 1.0, 1.0]],
}


def test_a_row_follows_from_its_times():
    cell, errors = Cell(128, 4, 4096, 4), dict.fromkeys(SAMPLES, 0.5)
    found = kernel_report.summarise(cell, SAMPLES, CONTENDERS, errors, torch.bfloat16, 4e12)
    rows = {row["contender"]: row for row in found}
    single = rows["single_pass"]
    assert single["block_us_rounds"] == [20, 40, 20]
    assert single["block_us"] == {"median": 20, "q1": 20, "q3": 30}
    assert single["site_us"] == 5 and single["first_us"] == 4 and single["later_us"] == 6.5
    # Ratios are taken within a round: the second, twice as slow for all, does not show.
    assert single["ratios"] == {BASELINE: 5}
    assert rows["two_phase"]["ratios"] == {BASELINE: 2.5, "single_pass": 0.5}
    assert rows[BASELINE]["ratios"] == {"single_pass": 0.2}
    group = traffic.block_rows(4, 4)
    bytes_ = traffic.single_pass_group(128, group, 4096, torch.bfloat16)
    assert single["bytes"] == bytes_
    assert single["floor_us"] == pytest.approx(bytes_ / 4e12 * 1e6)
    assert single["floor_share"] == pytest.approx(single["floor_us"] / 20)


# The command.


def test_without_a_gpu_the_gate_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.main(["--gate-only"]) == 1
    written = capsys.readouterr()
    assert written.out == "" and written.err.strip() == kernels.NO_INTERPRETER


def test_a_name_that_is_no_contender(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.main(["--gate-only", "--contenders", "single_pass", "fastest"]) == 1
    assert "no contender fastest here; there are single_pass, two_phase" in capsys.readouterr().err


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GPU that times everything as in ``SAMPLES``; the dictionary fails contenders by name."""
    wrong: dict[str, str] = {}

    def examine(cell, contenders, device, dtype):
        passed = {name: None for name in contenders if name not in wrong}
        return (
            passed,
            dict.fromkeys(passed, 0.5),
            {n: r for n, r in wrong.items() if n in contenders},
        )

    def measure(runs, rounds, stopwatch):
        return {name: SAMPLES[name] for name in runs}, {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "environment", lambda device: {"device": "pretended"})
    monkeypatch.setattr(kernels, "examine_cell", examine)
    for name, value in (
        ("ColdCache", lambda device: types.SimpleNamespace(bytes=1)),
        ("Stopwatch", lambda cache, most: None),
        ("copy_bandwidth", lambda stopwatch, device: 4e12),
        ("launch_time", lambda stopwatch, device: 1.0),
        ("measure", measure),
    ):
        monkeypatch.setattr(kernel_timing, name, value)
    return wrong


ARGUMENTS = ["--tokens", "1", "128", "--blocks", "4", "--hidden", "4096", "--sites", "4"]
ARGUMENTS += ["--contenders", *SAMPLES]
DOCUMENT = {"benchmark", "command", "hardware", "device", "method", "contenders"}
DOCUMENT |= {"absent", "failures", "left_out"}
ROW = {"tokens", "blocks", "hidden", "sites", "contender", "rounds", "block_us", "site_us"}
ROW |= {"first_us", "later_us", "bytes", "floor_us", "floor_share", "ratios", "gate"}
ROW |= {"block_us_rounds"}


def test_the_document_is_whole(pretended_gpu, capsys, tmp_path):
    out = tmp_path / "results" / "kernels.json"
    assert kernels.main([*ARGUMENTS, "--out", str(out)]) == 0
    written = capsys.readouterr()
    *table, last = written.out.splitlines()
    document, summary = json.loads(out.read_text()), json.loads(last)
    assert document.keys() == DOCUMENT | {"results"} and summary.keys() == DOCUMENT | {"rows"}
    assert summary["rows"] == len(document["results"]) == 6 == len(table)
    assert "T=128 n=4 d=4096 S=4 two_phase: 10.0 us, 63% of a copy's speed" in table
    assert document["command"].endswith("--out kernels.json")
    assert document["method"] == {
        "dtype": "bfloat16",
        "timed": True,
        "rounds": 15,
        "discarded_rounds": kernel_timing.DISCARDED,
        "cold_bytes": 1,
        "copy_bytes_per_s": 4e12,
        "copy_bytes_per_s_at_end": 4e12,
        "launch_us": 1.0,
    }
    for row in document["results"]:
        assert row.keys() == ROW
        assert row["block_us"]["median"] == median(row["block_us_rounds"])
    assert {one["algorithm"] for one in document["contenders"].values()} == {
        "single_pass",
        "two_phase",
        "residual",
    }


def test_one_that_fails_is_in_the_document_and_ours_in_the_exit_status(pretended_gpu, capsys):
    pretended_gpu[BASELINE] = "site 0 is off by 3 times what it may be"
    assert kernels.main(ARGUMENTS) == 0
    written = capsys.readouterr()
    summary = json.loads(written.out.splitlines()[-1])
    assert summary["rows"] == 4
    assert [(one["tokens"], one["contender"]) for one in summary["failures"]] == [
        (1, BASELINE),
        (128, BASELINE),
    ]
    assert f"T=1 n=4 d=4096 S=4: {BASELINE} is not timed: site 0 is off by" in written.err
    pretended_gpu["two_phase"] = "site 1 is off by inf times what it may be"
    assert kernels.main(ARGUMENTS) == 1


def test_a_cell_that_fails_as_a_whole_costs_no_other(pretended_gpu, monkeypatch, capsys):
    examine = kernels.examine_cell

    def out_of_memory(cell, *others):
        if cell.tokens == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return examine(cell, *others)

    monkeypatch.setattr(kernels, "examine_cell", out_of_memory)
    assert kernels.main(ARGUMENTS) == 1
    written = capsys.readouterr()
    summary = json.loads(written.out.splitlines()[-1])
    assert summary["rows"] == 3
    assert [(one["tokens"], one["contender"]) for one in summary["failures"]] == [(1, None)]
    assert "the cell is not timed: OutOfMemoryError: CUDA out of memory" in written.err


def test_one_that_cannot_be_captured_is_not_timed(monkeypatch):
    def capture(run):
        if run.sites:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [1, 2]

    monkeypatch.setattr(kernel_timing, "capture", capture)
    stopwatch = types.SimpleNamespace(times=lambda graphs: [float(graph) for graph in graphs])
    runs = {"good": Run([], list, list), "bad": Run([list], list, list)}
    samples, failures = kernel_timing.measure(runs, 2, stopwatch)
    assert samples == {"good": [[1.0, 2.0], [1.0, 2.0]]}
    assert failures.keys() == {"bad"} and "it cannot be captured: RuntimeError" in failures["bad"]


def test_what_time_and_memory_leave_out_is_named(pretended_gpu, monkeypatch, capsys):
    assert kernels.main([*ARGUMENTS, "--minutes", "-1"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out.splitlines()[-1])["left_out"] == {"memory": 0, "time": 2}
    assert "left out, --minutes is over: T=1 n=4 d=4096 S=4; T=128" in written.err
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * 2**20, 8 * 2**20))
    assert kernels.main(ARGUMENTS) == 0
    written = capsys.readouterr()
    assert json.loads(written.out.splitlines()[-1])["left_out"] == {"memory": 1, "time": 0}
    assert "left out, too large for memory: T=128 n=4 d=4096 S=4" in written.err


@pytest.mark.usefixtures("interpreter")
@pytest.mark.skipif(ON_GPU, reason="the command would gate every cell")
def test_the_command_gates_in_the_interpreter(tmp_path, capsys):
    out = tmp_path / "gate.json"
    assert kernels.main(["--gate-only", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert not document["failures"] and document["method"] == {"dtype": "float32", "timed": False}
    found = [(row["tokens"], row["contender"]) for row in document["results"]]
    assert found == [(cell.tokens, name) for cell in kernel_cells.TINY for name in OURS]
    assert all(0 < row["gate"] <= 1 for row in document["results"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == json.loads(last)["rows"] == len(found)
    assert lines[0].startswith("T=1 n=1 d=64 S=2 single_pass: right, ")
