"""Goldens on two workers: tensor parallel, and pipelines split anywhere, also inside a block."""

import pytest
from serving import GOLDENS, check_executed, check_job, engine_job, expected, run_engine

from attnres_serve.checkpoint import inspect
from attnres_serve.schedule import sites

pytestmark = pytest.mark.engine

BLOCK, FULL = "fla_transformer_block", "fla_transformer_full"
LAYERS = {BLOCK: 5, FULL: 3}
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def run(golden: str, algorithm: str, mode: str, folder, env, **options) -> None:
    cases = expected(GOLDENS / golden)
    prompts = [case["prompt"] for case in cases]
    job = engine_job(
        GOLDENS / golden,
        prompts,
        algorithm,
        mode,
        distributed_executor_backend="mp",
        **options,
    )
    (result,) = run_engine([job], folder, **ONE_CORE_EACH, **env)["results"]
    check_job(result, cases)
    check_executed(result, algorithm, compiled=mode == "compiled")


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        ("two_phase", "eager"),
        pytest.param("single_pass", "eager", marks=pytest.mark.exhaustive),
        pytest.param("single_pass", "compiled", marks=pytest.mark.exhaustive),
        pytest.param("two_phase", "compiled", marks=pytest.mark.exhaustive),
    ],
)
def test_tensor_parallel(algorithm, mode, tmp_path):
    run(BLOCK, algorithm, mode, tmp_path, {}, tensor_parallel_size=2)


EVERY = [
    (golden, algorithm, first)
    for golden in (BLOCK, FULL)
    for algorithm in ("single_pass", "two_phase")
    for first in range(1, LAYERS[golden])
]
SUBSET = [(BLOCK, "two_phase", 3)]


@pytest.mark.parametrize(
    ("golden", "algorithm", "first"),
    [
        pytest.param(*row, marks=pytest.mark.versions if row in SUBSET else pytest.mark.exhaustive)
        for row in EVERY
    ],
)
def test_pipeline_parallel(golden, algorithm, first, tmp_path):
    """The first stage has ``first`` layers.  (Stock vLLM's eager mode has no pipelines on CPU.)"""
    env = {"VLLM_PP_LAYER_PARTITION": f"{first},{LAYERS[golden] - first}"}
    run(golden, algorithm, "compiled", tmp_path, env, pipeline_parallel_size=2)


def test_splits_lie_inside_blocks_and_between_them():
    """After an odd number of layers the second stage's first site receives a partial sum."""
    translation = inspect(GOLDENS / BLOCK)
    assert translation is not None and translation.spec is not None
    inside = [
        not site.opens_block and site.reads_partial for site in sites(translation.spec)[2:-1:2]
    ]
    assert inside == [True, False, True, False]
    assert all(first % 2 for golden, _, first in SUBSET if golden == BLOCK)
