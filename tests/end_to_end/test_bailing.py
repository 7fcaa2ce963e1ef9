"""Ling 2 and Ring-linear with random queries: Hugging Face has no classes of them.

Their judges are classes of their parts, with names changed and equations added in ``support``.
"""

import random
from itertools import cycle

import ling_model
import pytest
import ring_model
from checkpoints import write_house
from facts import FACTS
from goldens import check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named

from attnres_serve.settings import ALGORITHMS
from tests.end_to_end.test_families import CHUNK, check_trace

pytestmark = [pytest.mark.engine, pytest.mark.families]

JUDGES = {"bailing_hybrid": ring_model.load, "bailing_moe": ling_model.load}
CASES = {
    f"{name} {variant}".strip(): (name, changes)
    for name in JUDGES
    for variant, changes in FACTS[name].variants.items()
}
CHOSEN = dict(zip(CASES, cycle(ALGORITHMS), strict=False))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    random.seed()
    root, jobs = tmp_path_factory.mktemp("bailing"), {}
    for case, (name, changes) in CASES.items():
        seed = random.randrange(10**6)
        write_house(root / case, name, layers=4, block_size=3, seed=seed, changes=changes)
        prompts = fresh_prompts((7, 190, 1))
        jobs[case] = engine_job(root / case, prompts, CHOSEN[case], chunk=CHUNK, trace=True)
    return root, run_named(jobs, root / "run")


@pytest.mark.parametrize("case", CASES)
def test_it_equals_its_equations_with_mixes(runs, case, record_property):
    root, results = runs
    name, _ = CASES[case]
    job, result = results[case]
    model = JUDGES[name](root / case)
    check_all_against(model, job, result, caches_prefixes=FACTS[name].caches_prefixes)
    check_executed(result, CHOSEN[case], compiled=False)
    check_trace(model, max(job["prompts"], key=len), result["trace"])
    for column in ("exact", "trace", "chunked"):
        record_property("shows", (name, column))
