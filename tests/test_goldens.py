"""The goldens, served: every checkpoint, both algorithms, eager and compiled, through vLLM's own
API server, through ours and through the engine; alone, batched, cached and chunked."""

import itertools
import json
from pathlib import Path

import pytest
from checkpoints import house_copy_of_fla
from serving import (
    GOLDENS,
    OURS,
    VLLMS,
    check_executed,
    check_golden_over_http,
    check_job,
    engine_job,
    expected,
    run_engine,
    running,
)

pytestmark = pytest.mark.engine

BLOCK, FULL, SMALL = "fla_transformer_block", "fla_transformer_full", "fla_transformer_small_scale"
HOUSE = "house_copy_of_block"
CHUNK = 48  # tokens per step: the prompts of 70 and 200 tokens need several

# Way in, golden, algorithm, mode, chunked, backend.  Every pair of values of any two columns is
# in a row.
PAIRWISE = [
    ("ours", BLOCK, "single_pass", "compiled", True, "cpp"),
    ("ours", FULL, "two_phase", "eager", False, "torch"),
    ("ours", SMALL, "single_pass", "eager", False, "cpp"),
    ("ours", HOUSE, "two_phase", "compiled", True, "cpp"),
    ("vllm", BLOCK, "two_phase", "eager", False, "cpp"),
    ("vllm", FULL, "single_pass", "compiled", True, "cpp"),
    ("vllm", SMALL, "two_phase", "compiled", False, "torch"),
    ("vllm", HOUSE, "single_pass", "eager", True, "cpp"),
    ("engine", BLOCK, "single_pass", "eager", True, "torch"),
    ("engine", FULL, "two_phase", "compiled", False, "cpp"),
    ("engine", SMALL, "two_phase", "compiled", True, "cpp"),
    ("engine", HOUSE, "single_pass", "compiled", False, "torch"),
]
EVERY = {
    *PAIRWISE,
    *itertools.product(
        ("ours", "vllm"),
        (BLOCK, FULL, SMALL, HOUSE),
        ("single_pass", "two_phase"),
        ("eager", "compiled"),
        (False, True),
        ("cpp",),  # what carries a request to a backend is the same for both
    ),
    *itertools.product(
        ("engine",),
        (BLOCK, FULL, SMALL, HOUSE),
        ("single_pass", "two_phase"),
        ("eager", "compiled"),
        (False, True),
        ("cpp", "torch"),
    ),
}
COMBINATIONS = [
    pytest.param(*row, marks=() if row in PAIRWISE else pytest.mark.exhaustive)
    for row in sorted(EVERY)
]


def test_the_subset_is_pairwise():
    """Every pair of values that two columns can take stands in some row of the subset."""
    columns = list(zip(*PAIRWISE, strict=True))
    for first, second in itertools.combinations(columns, 2):
        assert set(zip(first, second, strict=True)) == set(
            itertools.product(set(first), set(second))
        )


@pytest.fixture(scope="module")
def house_copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("house") / HOUSE
    house_copy_of_fla(GOLDENS / BLOCK, folder)
    (folder / "expected.json").write_bytes((GOLDENS / BLOCK / "expected.json").read_bytes())
    return folder


@pytest.mark.parametrize(("way", "name", "algorithm", "mode", "chunked", "backend"), COMBINATIONS)
def test_golden(way, name, algorithm, mode, chunked, backend, house_copy, tmp_path):
    golden = house_copy if name == HOUSE else GOLDENS / name
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enable-prompt-tokens-details"]
    if mode == "eager":
        flags.append("--enforce-eager")
    if chunked:
        flags += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]
    if way == "engine":
        info = run_in_engine(golden, algorithm, mode, chunked, backend, tmp_path)
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
            info = server.info
    assert info["backend"] == backend
    check_executed(info, algorithm, compiled=mode == "compiled")


def run_in_engine(golden, algorithm, mode, chunked, backend, tmp_path) -> dict:
    """The same through ``vllm.LLM``."""
    cases = expected(golden)
    job = engine_job(golden, [case["prompt"] for case in cases], algorithm, mode, backend)
    (result,) = run_engine([job | {"chunk": CHUNK if chunked else 0}], tmp_path)["results"]
    check_job(result, cases)
    return result
