"""Every family with its sites divided over two workers, against the float64 model of its own class.

``test_parallel`` has the goldens, in which sites divided give to the bit what whole ones give.
"""

import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import fla_models
import ling_model
import pytest
import ring_model
import tiny_sites
from checkpoints import write_house
from facts import FACTS
from goldens import check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.families import FAMILIES
from attnres_serve.families.footprint import expert_layers
from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify import oracle
from tests.end_to_end.test_families import CHUNK, chosen
from tests.end_to_end.test_family_ways import TWO
from tests.end_to_end.test_parallel import STEPS, sharded

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # FLA's and Transformers'

JUDGES: dict[str, Callable[[Path], Any]] = {
    **{name: tiny_sites.load for name in FAMILIES},
    **{name: fla_models.load for name in fla_models.DELTA},
    "bailing_hybrid": ring_model.load,
    "bailing_moe": ling_model.load,
    **dict.fromkeys(("gated_llama", "normed_llama"), oracle.load),
}
NORM_SUMS = ("afmoe", "gemma2", "gemma3_text", "glm4")  # their layers, behind each sublayer
IN_SHORT = ("mixtral", "gemma2")  # experts, and norms behind sublayers
CASES = {
    **{name: (name, "eager") for name in FAMILIES},
    **{f"{name} compiled": (name, "compiled") for name in FAMILIES},
}
PARAMETERS = [
    pytest.param(
        case,
        marks=[pytest.mark.exhaustive]
        if mode == "compiled"
        else []
        if name in IN_SHORT
        else [pytest.mark.families],
    )
    for case, (name, mode) in CASES.items()
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Jobs with their results by case, from one process."""
    random.seed()  # fresh prompts; a failure prints what it needs
    root, jobs = tmp_path_factory.mktemp("sharded"), {}
    for case, algorithm in zip(chosen(request, "case"), cycle(ALGORITHMS), strict=False):
        name, mode = CASES[case]
        folder = write(root / case, name, random.randrange(10**6))
        prompts, two = fresh_prompts((7, 190)), {"tensor_parallel_size": 2, **TWO}
        jobs[case] = sharded(engine_job(folder, prompts, algorithm, mode, chunk=CHUNK, **two))
        jobs[case]["counted"] = STEPS
    return run_named(jobs, root / "run")


def write(folder: Path, name: str, seed: int) -> Path:
    if name in fla_models.DELTA:
        return fla_models.write(folder, name, seed, attnres_block_size=4)
    return write_house(folder, name, layers=4, block_size=3, seed=seed)


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_family_with_sharded_sites(case: str, runs, record_property) -> None:
    """Sums are left to the sites but for those of experts, and those that the layer norms."""
    job, result = runs[case]
    name, mode = CASES[case]
    folder = Path(job["checkpoint"])
    check_all_against(JUDGES[name](folder), job, result, FACTS[name].caches_prefixes)
    check_executed(result, job["algorithm"], compiled=mode == "compiled")
    parsed = check_folder(folder).parsed
    assert parsed is not None and parsed.spec is not None
    sublayers = parsed.spec.num_sublayers
    experts = expert_layers(FAMILIES[name].shapes(parsed.config))
    for many, few in zip(*result["asked"], strict=True):
        left = 0 if name in NORM_SUMS else sublayers - len(experts)
        assert many.get("reduce_scatter", 0) == left
        assert many["all_gather"] - few.get("all_gather", 0) == sublayers
        assert "reduce_scatter" not in few
    if mode == "eager":
        record_property("shows", (name, "sharded"))
