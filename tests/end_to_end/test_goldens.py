"""The goldens, served: by single pass and two-phase, eager and compiled, through vLLM's own API
server, through ours and through the engine; alone, batched, cached and chunked; and over HTTP
traced while they are served."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens import check_executed, check_golden_over_http, check_job, expected
from jobs import engine_job, run_engine
from serving import GOLDENS, OURS, VLLMS, running
from trace_cases import FAR, check_vectors, wanted
from trace_http import check_golden_traces

from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify.oracle import load

pytestmark = pytest.mark.engine
EXHAUSTIVE = pytest.mark.exhaustive

BLOCK, FULL, SMALL = "fla_transformer_block", "fla_transformer_full", "fla_transformer_small_scale"
HOUSE = "house_copy_of_block"
DELTA, DELTA_FULL = "qwen3_attnres_block", "qwen3_attnres_full"
OPEN, OPEN_FULL = "qwen3_attnres_cumulative_block", "qwen3_attnres_cumulative_full"
BASELINE = "baseline_attnres"
FORMATS = {
    "fla": (BLOCK, FULL, SMALL),
    "house": (HOUSE,),
    "delta_attnres": (DELTA, DELTA_FULL),
    "open_attnres": (OPEN, OPEN_FULL),
    "baseline_attnres": (BASELINE,),
}
GOLDENS_OF_FORMATS = {golden for goldens in FORMATS.values() for golden in goldens}
FORMAT_OF = {golden: name for name, goldens in FORMATS.items() for golden in goldens}
CHUNK = 48  # tokens per step: the prompts of 70 and 200 tokens need several

# Way in, golden, algorithm, mode, chunked, backend.  Every pair of values of any two columns is in
# a row, with the format instead of the golden; backends know tensors, not formats.  (All
# goldens in all ways of running are in test_golden_in_every_way.)
PAIRWISE = [
    ("ours", FULL, "two_phase", "eager", False, "torch"),
    ("ours", HOUSE, "two_phase", "eager", True, "cpp"),
    ("ours", DELTA_FULL, "two_phase", "eager", False, "cpp"),
    ("ours", OPEN_FULL, "single_pass", "compiled", False, "cpp"),
    ("vllm", BLOCK, "single_pass", "eager", True, "cpp"),
    ("vllm", HOUSE, "single_pass", "compiled", False, "torch"),
    ("vllm", DELTA, "two_phase", "compiled", True, "torch"),
    ("vllm", OPEN, "two_phase", "eager", True, "torch"),
    ("engine", SMALL, "two_phase", "compiled", True, "cpp"),
    ("engine", HOUSE, "single_pass", "compiled", False, "cpp"),
    ("engine", DELTA, "single_pass", "eager", False, "cpp"),
    ("engine", OPEN_FULL, "single_pass", "eager", False, "torch"),
    ("ours", BASELINE, "single_pass", "compiled", True, "torch"),
    ("vllm", BASELINE, "two_phase", "compiled", False, "cpp"),
    ("engine", BASELINE, "two_phase", "eager", False, "torch"),
]
# With every version of vLLM: a Llama and a Qwen3, each algorithm, eager and compiled, over HTTP.
VERSIONS = {
    ("engine", HOUSE, "single_pass", "compiled", False, "cpp"),
    ("engine", SMALL, "two_phase", "compiled", True, "cpp"),
    ("engine", DELTA, "single_pass", "eager", False, "cpp"),
    ("ours", DELTA_FULL, "two_phase", "eager", False, "cpp"),
}
# Every way in, algorithm and backend, chunked and not; the other rows are for `make test-all`.
# Compiled code is in test_parallel.py and test_piecewise.py, formats are in test_engine.py.
SHORT = {PAIRWISE[row] for row in (1, 4, 11)}
ROWS = [
    pytest.param(
        *row,
        marks=[
            *([pytest.mark.versions] if row in VERSIONS else []),
            *([] if row in SHORT else [EXHAUSTIVE]),
        ],
    )
    for row in PAIRWISE
]


def test_the_subset_is_pairwise():
    """Every pair of values that two columns can take stands in some row of the subset."""
    assert VERSIONS.issubset(PAIRWISE)
    for values, short in zip(zip(*PAIRWISE, strict=True), zip(*SHORT, strict=True), strict=True):
        if not {*values} & {*GOLDENS_OF_FORMATS, "compiled"}:
            assert {*short} == {*values}
    ways, goldens, *run, backends = zip(*PAIRWISE, strict=True)
    formats = tuple(FORMAT_OF[golden] for golden in goldens)
    pairs = [*itertools.combinations((ways, formats, *run), 2)]
    pairs += [(backends, column) for column in (ways, *run)]
    for first, second in pairs:
        assert set(zip(first, second, strict=True)) == set(
            itertools.product(set(first), set(second))
        )
    # nanoGPT's are in test_nanogpt.py.
    others = {path.name for path in GOLDENS.iterdir() if path.name.startswith("nanogpt")}
    assert set(goldens) | others == {path.name for path in GOLDENS.iterdir()} | {HOUSE}


@pytest.fixture(scope="module")
def house_copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("house") / HOUSE
    convert(str(GOLDENS / BLOCK), str(folder), to_house=True)
    (folder / "expected.json").write_bytes((GOLDENS / BLOCK / "expected.json").read_bytes())
    return folder


@pytest.mark.parametrize(("way", "name", "algorithm", "mode", "chunked", "backend"), ROWS)
def test_golden(way, name, algorithm, mode, chunked, backend, house_copy, tmp_path):
    golden = house_copy if name == HOUSE else GOLDENS / name
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enable-prompt-tokens-details"]
    if mode == "eager":
        flags.append("--enforce-eager")
    if chunked:
        flags += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]
    if way == "engine":
        job = golden_job(golden, algorithm, mode, chunked, backend) | {"trace": True}
        (info,) = run_engine([job], tmp_path)["results"]
        check_job(info, expected(golden))
        check_trace(golden, max(job["prompts"], key=len), info)
    else:
        env = {}
        if way == "ours":
            command = OURS
            flags += ["--attnres-algorithm", algorithm, "--attnres-backend", backend]
        else:
            command = VLLMS
            chosen = {"attnres_algorithm": algorithm, "attnres_backend": backend}
            flags += ["--additional-config", json.dumps(chosen)]
            env["VLLM_PLUGINS"] = "attnres"  # lets vLLM's own server load our endpoint
        with running(command, golden, tmp_path / "log", *flags, **env) as server:
            check_golden_over_http(server, golden)
            check_golden_traces(server, golden)
            info = server.info
    assert info["backend"] == backend
    check_executed(info, algorithm, compiled=mode == "compiled")


def check_trace(golden: Path, ids: list[int], result: dict[str, Any]) -> None:
    """Weights and magnitudes of all tokens, and vectors of three of them."""
    model, trace = load(golden), result["trace"]
    weights, rms = wanted(model, ids)
    found = {name: torch.tensor(own) for name, own in result["vectors"].items()}
    check_vectors(model, ids, [0, len(ids) // 2, len(ids) - 1], found)
    assert [site for site, *_ in trace] == list(range(len(weights)))
    for site, own, size in trace:
        np.testing.assert_allclose(own, weights[site], atol=FAR)
        np.testing.assert_allclose(size, rms[site], atol=FAR, rtol=FAR)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("name", [HOUSE, *sorted(path.name for path in GOLDENS.iterdir())])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_golden_in_every_way(backend, name, mode, house_copy, tmp_path):
    """All algorithms, chunked and not.  (The way in is the subset's matter.)"""
    golden = house_copy if name == HOUSE else GOLDENS / name
    ways = list(itertools.product(ALGORITHMS, (False, True)))
    jobs = [golden_job(golden, algorithm, mode, chunked, backend) for algorithm, chunked in ways]
    results = run_engine(jobs, tmp_path)["results"]
    for (algorithm, _), result in zip(ways, results, strict=True):
        check_job(result, expected(golden))
        assert result["backend"] == backend
        check_executed(result, algorithm, compiled=mode == "compiled")


def golden_job(golden, algorithm, mode, chunked, backend) -> dict:
    prompts = [case["prompt"] for case in expected(golden)]
    job = engine_job(golden, prompts, algorithm, mode, backend)
    return job | {"chunk": CHUNK if chunked else 0}


# Each algorithm on blocks, on Full AttnRes or on a cumulative sum, eager and compiled; and how many
# prompts: of all of them each row takes minutes.
TRITON = [
    (FULL, "two_phase", "eager", 2),
    (BLOCK, "two_phase", "compiled", None),
    (FULL, "single_pass", "compiled", None),
    (FULL, "two_phase", "compiled", None),
    (OPEN, "single_pass", "eager", None),
    (OPEN, "two_phase", "compiled", None),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "algorithm", "mode", "prompts"), TRITON)
def test_golden_in_the_interpreter_of_triton(name, algorithm, mode, prompts, tmp_path):
    """The triton backend in a whole model."""
    golden = GOLDENS / name
    cases = expected(golden)[:prompts]
    tokens = [case["prompt"] for case in cases]
    # In blocks of 32, so that the second shortest prompt, of 33 tokens, is cached.
    job = engine_job(golden, tokens, algorithm, mode, "triton", block_size=32)
    (result,) = run_engine([job], tmp_path, TRITON_INTERPRET="1")["results"]
    check_job(result, cases)
    assert result["backend"] == "triton"
    check_executed(result, algorithm, compiled=mode == "compiled")
