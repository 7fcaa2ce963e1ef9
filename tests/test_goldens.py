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
    differences,
    engine_job,
    expected,
    run_engine,
    running,
)

pytestmark = pytest.mark.engine

BLOCK, FULL, SMALL = "fla_transformer_block", "fla_transformer_full", "fla_transformer_small_scale"
HOUSE = "house_copy_of_block"
DELTA, DELTA_FULL = "qwen3_attnres_block", "qwen3_attnres_full"
OPEN, OPEN_FULL = "qwen3_attnres_cumulative_block", "qwen3_attnres_cumulative_full"
FORMATS = {
    "fla": (BLOCK, FULL, SMALL),
    "house": (HOUSE,),
    "delta_attnres": (DELTA, DELTA_FULL),
    "open_attnres": (OPEN, OPEN_FULL),
}
FORMAT_OF = {golden: name for name, goldens in FORMATS.items() for golden in goldens}
CHUNK = 48  # tokens per step: the prompts of 70 and 200 tokens need several

# Way in, golden, algorithm, mode, chunked.  Every pair of values of any two columns is in a row,
# with the format in the place of the golden where the other column is the way in.
PAIRWISE = [
    ("ours", BLOCK, "single_pass", "compiled", True),
    ("vllm", BLOCK, "two_phase", "eager", False),
    ("engine", FULL, "two_phase", "compiled", False),
    ("ours", FULL, "single_pass", "eager", True),
    ("engine", SMALL, "two_phase", "compiled", True),
    ("vllm", SMALL, "single_pass", "eager", False),
    ("ours", HOUSE, "two_phase", "eager", True),
    ("vllm", HOUSE, "single_pass", "compiled", True),
    ("engine", HOUSE, "single_pass", "eager", False),
    ("vllm", DELTA, "two_phase", "eager", True),
    ("engine", DELTA, "single_pass", "compiled", False),
    ("ours", DELTA_FULL, "two_phase", "eager", False),
    ("engine", DELTA_FULL, "single_pass", "compiled", True),
    ("engine", OPEN, "two_phase", "compiled", True),
    ("ours", OPEN, "single_pass", "eager", False),
    ("vllm", OPEN_FULL, "two_phase", "compiled", True),
    ("engine", OPEN_FULL, "single_pass", "eager", False),
]
EVERY = itertools.product(
    ("ours", "vllm", "engine"),
    FORMAT_OF,
    ("single_pass", "two_phase"),
    ("eager", "compiled"),
    (False, True),
)
COMBINATIONS = [
    pytest.param(*row, marks=() if row in PAIRWISE else pytest.mark.exhaustive) for row in EVERY
]


def test_the_subset_is_pairwise():
    """Every pair of values that two columns can take stands in some row of the subset."""
    ways, goldens, *others = zip(*PAIRWISE, strict=True)
    formats = tuple(FORMAT_OF[golden] for golden in goldens)
    pairs = [*itertools.combinations((ways, formats, *others), 2)]
    pairs += [(goldens, column) for column in others]
    for first, second in pairs:
        assert set(zip(first, second, strict=True)) == set(
            itertools.product(set(first), set(second))
        )
    assert set(goldens) == {path.name for path in GOLDENS.iterdir()} | {HOUSE}


@pytest.fixture(scope="module")
def house_copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("house") / HOUSE
    house_copy_of_fla(GOLDENS / BLOCK, folder)
    (folder / "expected.json").write_bytes((GOLDENS / BLOCK / "expected.json").read_bytes())
    return folder


@pytest.mark.parametrize(("way", "name", "algorithm", "mode", "chunked"), COMBINATIONS)
def test_golden(way, name, algorithm, mode, chunked, house_copy, tmp_path):
    golden = house_copy if name == HOUSE else GOLDENS / name
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enable-prompt-tokens-details"]
    if mode == "eager":
        flags.append("--enforce-eager")
    if chunked:
        flags += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]
    if way == "engine":
        info = run_in_engine(golden, algorithm, mode, chunked, tmp_path)
    else:
        env = {}
        if way == "ours":
            command = OURS
            flags += ["--attnres-algorithm", algorithm]
        else:
            command = VLLMS
            flags += ["--additional-config", json.dumps({"attnres_algorithm": algorithm})]
            env["VLLM_PLUGINS"] = "attnres"  # lets vLLM's own server load our endpoint
        with running(command, golden, tmp_path / "log", *flags, **env) as server:
            check_golden_over_http(server, golden)
            info = server.info
    check_executed(info, algorithm, compiled=mode == "compiled")


def run_in_engine(golden, algorithm, mode, chunked, tmp_path) -> dict:
    """The same through ``vllm.LLM``."""
    cases = expected(golden)
    job = engine_job(golden, [case["prompt"] for case in cases], algorithm, mode)
    (result,) = run_engine([job | {"chunk": CHUNK if chunked else 0}], tmp_path)["results"]
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert result["cached"]["cached"] > 0
    found = []
    for case, answer in [
        *zip(cases, result["alone"], strict=True),
        *zip(cases, result["batch"], strict=True),
        (longest, result["cached"]),
    ]:
        found += differences(case, answer["prompt_logprobs"], answer["tokens"], answer["logprobs"])
    assert not found, "\n".join(found)
    return result
