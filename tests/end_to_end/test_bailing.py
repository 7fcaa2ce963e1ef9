"""Ling 2 and Ring-linear with random queries: Hugging Face has no classes of them.

Their judges are classes of their parts, with names changed and equations added in ``support``.
"""

from functools import partial

import ling_model
import pytest
import ring_model
from checkpoints import write_house
from facts import FACTS
from jobs import run_random

from tests.end_to_end.test_families import CHUNK, check_run

pytestmark = [pytest.mark.engine, pytest.mark.families]

JUDGES = {"bailing_hybrid": ring_model.load, "bailing_moe": ling_model.load}
CASES = {
    f"{name} {variant}".strip(): (name, changes)
    for name in JUDGES
    for variant, changes in FACTS[name].variants.items()
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    writers = {
        case: partial(write_house, base=name, layers=4, block_size=3, changes=changes)
        for case, (name, changes) in CASES.items()
    }
    root = tmp_path_factory.mktemp("bailing")
    return run_random(root, writers, (7, 190, 1), chunk=CHUNK, trace=True)


@pytest.mark.parametrize("case", CASES)
def test_it_equals_its_equations_with_mixes(runs, case, record_property):
    name, _ = CASES[case]
    folder, *run = runs[case]
    check_run(JUDGES[name](folder), *run, caches_prefixes=FACTS[name].caches_prefixes)
    for column in ("exact", "trace", "chunked"):
        record_property("shows", (name, column))
