"""FLA's classes with a recurrence, against themselves in float64."""

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import fla_models
import pytest
from goldens import all_moved, check_alike, check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_engine, run_random

from tests.end_to_end.test_families import CHUNK, check_traced, chosen, serve_zero_queries
from tests.end_to_end.test_family_ways import SPLIT, TWO

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # FLA's and Transformers'

# Further keys of config.json.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("gated_deltanet", {"attnres_block_size": 4}),
    "gated_deltanet, other sizes": (
        "gated_deltanet",
        {
            "attnres_block_size": 1,
            "num_v_heads": 4,
            "expand_v": 1.5,
            "conv_size": 3,
            "output_gate_activation": "sigmoid",
            "tie_word_embeddings": True,
            "norm_eps": 1e-3,
            "intermediate_size": None,
            "fuse_norm": False,
            "fuse_swiglu": False,
        },
    ),
    "kda": ("kda", {"attnres_block_size": 4}),
    "kda, other sizes": (
        "kda",
        {
            "attnres_block_size": 1,
            "num_heads": 3,
            "head_dim": 48,
            "conv_size": 3,
            "safe_gate": True,
            "lower_bound": -5,
            "tie_word_embeddings": True,
            "norm_eps": 1e-3,
        },
    ),
    "kda, a bound without safe_gate": ("kda", {"attnres_block_size": 2, "lower_bound": -0.5}),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Cases, served in one process."""
    writers = {
        name: partial(fla_models.write, model_type=CASES[name][0], **CASES[name][1])
        for name in chosen(request, "name")
    }
    root = tmp_path_factory.mktemp("fla")
    return run_random(root, writers, (7, 190, 1), chunk=CHUNK, trace=True)


@pytest.mark.families
@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_own_class(runs: dict[str, Any], name: str) -> None:
    folder, job, result = runs[name]
    check(fla_models.load(folder), job, result)


def check(model: fla_models.FlaModel, job: dict[str, Any], result: dict[str, Any]) -> None:
    check_all_against(model, job, result, caches_prefixes=False)
    check_executed(result, job["algorithm"], compiled=job["mode"] == "compiled")
    ids = max(job["prompts"], key=len)
    off = [one.traced(ids) for one in all_moved(model)]
    check_traced(model.traced(ids), off, result["trace"])


def run_and_check(
    model_type: str, root: Path, ways: Iterable[tuple[str, str, dict[str, Any], dict[str, str]]]
) -> None:
    """Serve a model in several ways: algorithm, mode, options and environment of each."""
    random.seed()
    folder = fla_models.write(
        root / "own", model_type, random.randrange(10**6), attnres_block_size=4
    )
    prompts = fresh_prompts((7, 190))
    jobs = [
        engine_job(folder, prompts, algorithm, mode, chunk=CHUNK, trace=True, **options)
        | {"env": env}
        for algorithm, mode, options, env in ways
    ]
    results = run_engine(jobs, root / "run")["results"]
    model = fla_models.load(folder)
    for one, result in zip(jobs, results, strict=True):
        check(model, one, result)


@pytest.mark.parametrize(
    "model_type",
    ["gated_deltanet", pytest.param("kda", marks=pytest.mark.families)],
)
def test_two_workers_share_the_layers(model_type: str, tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 2, **TWO}
    run_and_check(model_type, tmp_path, [("two_phase", "eager", options, {})])


@pytest.mark.families
@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_compiled(model_type: str, tmp_path: Path) -> None:
    """Alone, and on two workers that have some layers each."""
    options = {"pipeline_parallel_size": 2, **TWO}
    stages = ("two_phase", "compiled", options, {"VLLM_PP_LAYER_PARTITION": SPLIT})
    run_and_check(model_type, tmp_path, [("single_pass", "compiled", {}, {}), stages])


@pytest.mark.families
@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_zero_queries_equal_the_same_class_without(model_type: str, tmp_path: Path) -> None:
    plain = fla_models.write(tmp_path / "plain", model_type, 11, attnres_block_size=None)
    check_alike(fla_models.load(plain), *serve_zero_queries(plain, tmp_path))
