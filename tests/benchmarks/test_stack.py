"""The benchmark of a whole stack without a GPU: every way to connect it against the reference, a
planted mistake, and everything beside the clock."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from serving import ROOT
from triton_interpreter import (
    INTERPRETED,
    ON_GPU,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
)

from attnres_serve.kernels import traffic
from attnres_serve.kernels.triton import common
from benchmarks.kernels import timing as kernel_timing
from benchmarks.stack import __main__ as stack
from benchmarks.stack import model as stack_model
from benchmarks.stack.model import BASELINE, WAYS, Phase, Reference, Shape

DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = stack_model.TINY
BF16 = torch.bfloat16


EVERY = list(itertools.product(SHAPES, stack.TINY_PHASES, [torch.float32, BF16]))
PAIRWISE = [EVERY[number] for number in (0, 3, 4, 7, 8, 11)]  # every two choices in one of them


def test_the_chosen_rows_are_pairwise() -> None:
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(row[one], row[other]) for row in EVERY}
        assert {(row[one], row[other]) for row in PAIRWISE} == pairs


@pytest.mark.parametrize(
    ("name", "phase", "dtype"),
    [
        pytest.param(*row, marks=[] if row in PAIRWISE else [pytest.mark.exhaustive])
        for row in EVERY
    ],
    ids=str,
)
@pytest.mark.usefixtures("interpreter")
def test_every_way_is_right_and_leaves_nothing_behind(name, phase, dtype):
    """Two passes give the same: what is replayed does not depend on what ran before."""
    shape = SHAPES[name]
    with torch.inference_mode():
        weights = stack_model.draw_weights(shape, DEVICE, dtype)
        passes, errors, wrong = stack.passes_of(shape, weights, phase, list(WAYS))
        assert not wrong and passes.keys() == errors.keys() == WAYS.keys()
        assert 0 < max(errors.values()) <= 1
        results = {name: call() for name, call in passes.items()}
        for name, call in passes.items():
            assert torch.equal(call(), results[name])
            assert results[name].shape == (phase.tokens, shape.hidden)
        # A site's rounding grows on its way through the sublayers; other weights do not vanish.
        norm = results["single_pass"].double().norm()
        distance = {
            name: (result.double() - results["single_pass"].double()).norm() / norm
            for name, result in results.items()
        }
        assert distance["two_phase"] < 0.1
        assert distance[BASELINE] > 0.1


@pytest.mark.parametrize("missing", [1, 3, 6])
def test_a_site_that_is_wrong_is_named(missing):
    """The connection forgets the embedding at one site."""
    shape, phase = SHAPES["tiny"], Phase("prefill", 1, 5)

    class Forgetful(stack_model.Residual):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.right = None

        def begin(self, embedded):
            self.right = Reference(shape, weights, embedded)
            return super().begin(embedded)

        def step(self, site, delta):
            expected = self.right.step(site, delta)
            if site == missing:
                query = weights.queries[site] * weights.key_norms[site]
                sources = self.right._sources[1:]
                expected = stack_model.expected_site(sources, query, weights.norms[site])
            return expected.result.float()

    weights = stack_model.draw_weights(shape, "cpu", torch.float32)
    sublayers = stack_model.Sublayers(shape, weights, phase)
    embedded = torch.randn(phase.tokens, shape.hidden)
    connection = Forgetful(shape, weights, phase.tokens)
    found, reason = stack_model.examine(sublayers, WAYS["single_pass"], connection, embedded)
    assert found > 1 and reason.startswith(f"site {missing} is off by")


def test_decode_is_the_last_token_of_prefill():
    """Attention over a cache that prefill filled gives prefill's last row."""
    shape, tokens = SHAPES["tiny"], 6
    weights = stack_model.draw_weights(shape, "cpu", torch.float32)
    x = torch.randn(tokens, shape.hidden)
    whole = stack_model.Sublayers(shape, weights, Phase("prefill", 1, tokens))(2, x)
    decode = stack_model.Sublayers(shape, weights, Phase("decode", 1, tokens))
    heads = torch.nn.functional.linear(x, weights.qkv[1]).view(tokens, -1, shape.head_dim)
    _, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    decode._caches[1][0, 0], decode._caches[1][1, 0] = k.transpose(0, 1), v.transpose(0, 1)
    decode._caches[1][:, :, :, -1] = torch.nan  # the pass writes its own token there
    torch.testing.assert_close(decode(2, x[-1:]), whole[-1:], rtol=1e-5, atol=1e-5)


def test_the_shapes_are_what_their_names_say():
    # Llama-3-8B has 6.98 G parameters in its layers, Qwen3-0.6B 0.44 G.
    assert round(stack_model.SHAPES["8B"].parameters / 1e9, 2) == 6.98
    assert round(stack_model.SHAPES["0.6B"].parameters / 1e9, 2) == 0.44
    for shape in stack_model.SHAPES.values():
        assert shape.sublayers == 8 * shape.block_size
    assert [phase.tokens for phase in stack.PHASES] == [1, 8, 64, 256, 2048, 8192]


def test_late_sites_do_not_start_early(monkeypatch):
    """And whatever is launched behind them may."""
    seen = []

    class Step:
        def step(self, site, delta):
            seen.append(common._early_is_forbidden)
            return delta

    connection = stack_model.late(Step)()
    assert connection.step(1, "delta") == "delta"
    assert seen == [True] and not common._early_is_forbidden


def test_bytes_of_the_sites():
    shape, tokens = Shape(64, 3, 4, 2, 16, 128, block_size=3), 7  # 6 sublayers, sites 1 to 6
    found = {name: stack_model.connection_bytes(name, shape, tokens, BF16) for name in WAYS}
    place = {"tokens": tokens, "hidden": 64, "dtype": BF16}
    assert found[BASELINE] == 6 * (4 * tokens + 1) * 64 * 2
    assert found["single_pass"] == sum(
        traffic.single_pass(blocks=row, fresh=fresh, **place)
        for row, fresh in [(1, True), (1, False), (1, False), (2, True), (2, False), (2, False)]
    )
    # Sites 1, 2 | 3, 4, 5 | 6: the last is a block's first, alone.
    assert found["two_phase"] == (
        traffic.open_group(blocks=1, sites=2, fresh=True, **place)
        + traffic.open_group(blocks=1, sites=3, fresh=False, **place)
        + traffic.open_group(blocks=2, sites=1, fresh=False, **place)
        + traffic.merge(fresh=True, **place)
        + 2 * traffic.merge(fresh=False, **place)
    )


def test_bytes_and_operations_of_a_pass():
    shape = Shape(64, 2, 4, 2, 16, 128, block_size=2)
    parameters = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    assert shape.parameters == parameters
    decode, prefill = Phase("decode", 5, 10), Phase("prefill", 1, 10)
    cache = 2 * 5 * 2 * 10 * 16 * 2  # layers, batch, heads, context, size, keys and values
    assert stack_model.weight_and_cache_bytes(shape, decode, BF16) == 2 * (parameters + cache)
    assert stack_model.weight_and_cache_bytes(shape, prefill, BF16) == 2 * parameters
    pairs = 2 * 4 * 4 * 16  # layers, heads, two products of a multiplication and an addition
    assert stack_model.operations(shape, decode) == 2 * 5 * parameters + 50 * pairs
    assert stack_model.operations(shape, prefill) == 2 * 10 * parameters + 55 * pairs


def test_rows_and_table():
    samples = {BASELINE: [10.0, 20.0, 10.0], "single_pass": [11.0, 22.0, 12.0]}
    phase, shape = Phase("decode", 8, 1024), stack_model.SHAPES["8B"]
    base, single = stack.summarise("8B", shape, phase, samples, BF16)
    assert "ratio" not in base and base["us"] == {"median": 10, "q1": 10, "q3": 15}
    assert single["ratio"] == pytest.approx(1.1) and single["us_rounds"] == samples["single_pass"]
    assert single["ci95"] == pytest.approx([1.1, 1.2])
    assert single["bytes"] - single["site_bytes"] == base["bytes"] - base["site_bytes"]
    lines = stack.table([base, single], 4e12, 8e14).splitlines()
    assert len(lines) == 3 and lines[2].split()[:5] == ["8B", "decode", "8", "1024", "single_pass"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert stack.main([]) == 1
    written = capsys.readouterr()
    assert written.out == "" and written.err.strip() == stack.NO_GPU


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which everything but the passes is pretended."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(stack, "environment", lambda device: {"device": "pretended"})
    monkeypatch.setattr(stack, "matrix_rate", lambda stopwatch: 8e14)
    monkeypatch.setattr(stack_model, "draw_weights", lambda *shape: None)
    monkeypatch.setattr(kernel_timing, "ColdCache", lambda device: None)
    monkeypatch.setattr(kernel_timing, "Stopwatch", lambda cache, most: None)
    monkeypatch.setattr(kernel_timing, "copy_bandwidth", lambda stopwatch, device: 4e12)


def test_the_document_is_whole_whatever_fails(pretended_gpu, monkeypatch, capsys, tmp_path):
    def passes_of(shape, weights, phase, connections):
        if phase == stack.TINY_PHASES[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        good = {BASELINE: lambda: None, "single_pass": lambda: None}
        return good, dict.fromkeys(WAYS, 0.5), {"two_phase": "site 3 is off by 2"}

    def measure(runs, rounds, stopwatch):
        return {name: [[10.0 + len(name)]] * rounds for name in runs}, {}

    monkeypatch.setattr(stack, "passes_of", passes_of)
    monkeypatch.setattr(kernel_timing, "measure", measure)
    out = tmp_path / "stack.json"
    assert stack.main(["--quick", "--out", str(out)]) == 1
    written = capsys.readouterr()
    document = json.loads(written.out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert {(one["connection"], one["reason"]) for one in document["failures"]} == {
        (None, "OutOfMemoryError: CUDA out of memory"),
        ("two_phase", "site 3 is off by 2"),
    }
    timed = len(SHAPES) * (len(stack.TINY_PHASES) - 1)
    assert len(document["results"]) == 2 * timed
    assert {row["connection"] for row in document["results"]} == {BASELINE, "single_pass"}
    assert document["method"]["rounds"] == 3 and document["quick"]
    assert len(written.out.splitlines()) == 1 + 2 * timed + 1


@pytest.mark.skipif(ON_GPU, reason="the command would check the shapes of models")
def test_the_command_gates_in_the_interpreter(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stack", "--gate-only"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert not document["failures"] and not document["results"]
    assert len(document["gate"]) == len(SHAPES) * len(stack.TINY_PHASES) * len(WAYS)
    assert all(0 < one["error"] <= 1 for one in document["gate"])


if not ON_GPU and not INTERPRETED:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_the_stack_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
