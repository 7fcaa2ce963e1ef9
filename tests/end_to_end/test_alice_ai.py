"""AliceAI, of which neither Hugging Face nor vLLM for CPU has a class, in its own format."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import write_alice_ai, write_standard
from facts import FACTS
from goldens import check_alike
from jobs import fresh_prompts, run_random, run_verify, verify_job
from serving import FAMILY_GOLDENS

from attnres_serve.checkpoints.convert.command import convert
from tests.end_to_end.test_families import CHUNK, check_run, serve_zero_queries
from tests.end_to_end.test_family_ways import check_every_way

pytestmark = [pytest.mark.engine, pytest.mark.families]

GOLDEN = FAMILY_GOLDENS / "alice_ai"
LINEAR, FULL = "linear_attention", "full_attention"
VARIANTS = FACTS["alice_ai"].variants
# Layers, layers of a block, and further keys of config.json.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "short last block": (4, 3, {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]}),
    "other sizes": (4, 1, VARIANTS["one more of some"]),
    "one block": (4, 6, {"layer_types": [FULL, LINEAR, LINEAR, FULL]}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    writers = {
        name: partial(write_alice_ai, layers=layers, per_block=per_block, changes=changes)
        for name, (layers, per_block, changes) in SHAPES.items()
    }
    root = tmp_path_factory.mktemp("shapes")
    return run_random(root, writers, (7, 190, 1), chunk=CHUNK, trace=True)


@pytest.mark.parametrize("name", SHAPES)
def test_its_own_format_equals_transformers_mixers_with_mixes(runs, name):
    folder, *run = runs[name]
    check_run(tiny_sites.load(folder), *run)


def test_zero_queries_equal_the_same_class_without(tmp_path: Path) -> None:
    plain = write_standard(
        tmp_path / "plain",
        "alice_ai",
        layers=4,
        seed=11,
        changes={"block_attn_res_block_size": None},
    )
    job, *results = serve_zero_queries(plain, tmp_path)
    check_alike(tiny_sites.load(tmp_path / "zero"), job, *results)


def test_in_every_way(tmp_path, record_property):
    random.seed()
    check_every_way("alice_ai", tmp_path, record_property)


def test_the_house_format_of_a_golden_is_the_same_model(tmp_path):
    convert(str(GOLDEN), str(tmp_path / "house"), to_house=True)
    job = verify_job(tmp_path / "house", GOLDEN, fresh_prompts((40,)))
    (report,) = run_verify([job], tmp_path / "run")
    assert report["holds"], report
