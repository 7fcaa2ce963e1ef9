"""Goldens on two workers: tensor parallel, and pipelines split anywhere, also inside a block."""

import itertools

import pytest
from serving import GOLDENS, check_executed, check_job, engine_job, expected, run_engine

from attnres_serve.checkpoint import examine
from attnres_serve.schedule import sites
from attnres_serve.settings import ALGORITHMS
from attnres_serve.spec import AttnResSpec

pytestmark = pytest.mark.engine

BLOCK = "fla_transformer_block"


def spec_of(golden: str) -> AttnResSpec:
    translation = examine(GOLDENS / golden).translation
    assert translation is not None and translation.spec is not None
    return translation.spec


LAYERS = {path.name: spec_of(path.name).num_layers for path in sorted(GOLDENS.iterdir())}
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


def subset(rows, chosen: tuple, *marks):
    return [
        pytest.param(*row, marks=marks if row == chosen else pytest.mark.exhaustive) for row in rows
    ]


@pytest.mark.parametrize(
    ("golden", "algorithm", "mode"),
    subset(
        itertools.product(LAYERS, ALGORITHMS, ("eager", "compiled")), (BLOCK, "two_phase", "eager")
    ),
)
def test_tensor_parallel(golden, algorithm, mode, tmp_path):
    run(golden, algorithm, mode, tmp_path, {}, tensor_parallel_size=2)


SPLITS = [(golden, first) for golden, layers in LAYERS.items() for first in range(1, layers)]
IN_MID_BLOCK = 3  # layers of the first stage, in the golden with blocks of two layers


@pytest.mark.parametrize(
    ("golden", "first", "algorithm"),
    subset(
        ((*split, algorithm) for split in SPLITS for algorithm in ALGORITHMS),
        (BLOCK, IN_MID_BLOCK, "two_phase"),
        pytest.mark.versions,
    ),
)
def test_pipeline_parallel(golden, first, algorithm, tmp_path):
    """The first stage has ``first`` layers.  (Stock vLLM's eager mode has no pipelines on CPU.)"""
    env = {"VLLM_PP_LAYER_PARTITION": f"{first},{LAYERS[golden] - first}"}
    run(golden, algorithm, "compiled", tmp_path, env, pipeline_parallel_size=2)


def test_splits_lie_inside_blocks_and_between_them():
    """After an odd number of layers the second stage's first site receives a partial sum."""
    first_sites = sites(spec_of(BLOCK))[2:-1:2]
    inside = [not site.opens_block and site.reads_partial for site in first_sites]
    assert inside == [True, False, True, False]
    assert inside[IN_MID_BLOCK - 1]
