"""What a compiled start on CPU makes and keeps: the code of the sites, and the next start's."""

import json
from pathlib import Path

import pytest
from checkpoints import GOLDENS
from goldens import check_executed, check_job, expected
from jobs import engine_job, run_engine

from attnres_serve.kernels.cpp import direct as cpp_direct

pytestmark = pytest.mark.engine
GOLDEN = GOLDENS / "fla_transformer_block"
LOADED = "Directly load AOT compilation"


def start(folder: Path, cache: Path, **environment: str) -> str:
    """Serve the golden, compiled; returns the engine's log."""
    cases = expected(GOLDEN)
    prompts = [case["prompt"] for case in cases]
    job = engine_job(GOLDEN, prompts, "single_pass", mode="compiled")
    environment |= {"VLLM_CACHE_ROOT": str(cache), "VLLM_LOGGING_LEVEL": "INFO"}
    (answers,) = run_engine([job], folder, **environment)["results"]
    check_job(answers, cases)
    check_executed(answers, "single_pass", compiled=True)
    return (folder / "log").read_text()


@pytest.mark.exhaustive
def test_every_site_is_called_directly_and_the_next_start_loads_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert LOADED not in start(tmp_path / "first", cache)
    code = "".join(path.read_text() for path in cache.rglob("inductor_cache/**/*.py"))
    layers = json.loads((GOLDEN / "config.json").read_text())["num_hidden_layers"]
    assert code.count("attnres_single_pass(") == 2 * layers
    assert f"{cpp_direct.operator('single_pass')}(" not in code
    log = start(tmp_path / "second", cache)
    assert LOADED in log and "load failure" not in log


@pytest.mark.exhaustive
def test_code_for_wider_vectors_is_not_loaded(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    start(tmp_path / "wide", cache)
    assert LOADED not in start(tmp_path / "narrow", cache, ATEN_CPU_CAPABILITY="avx2")
    assert LOADED in start(tmp_path / "wide again", cache)
