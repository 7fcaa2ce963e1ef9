"""AliceAI, of which neither Hugging Face nor vLLM for CPU has a class, in its own format."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import write_alice_ai, write_standard
from facts import FACTS
from goldens import check_alike, check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_engine, run_random, run_verify
from serving import FAMILY_GOLDENS

from attnres_serve.checkpoints.convert.command import convert
from tests.end_to_end.test_families import CHUNK, check_trace
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
    folder, job, result = runs[name]
    model = tiny_sites.load(folder)
    check_all_against(model, job, result)
    check_executed(result, job["algorithm"], compiled=False)
    check_trace(model, max(job["prompts"], key=len), result["trace"])


def test_zero_queries_equal_the_same_class_without(tmp_path: Path) -> None:
    plain = write_standard(
        tmp_path / "plain",
        "alice_ai",
        layers=4,
        seed=11,
        changes={"block_attn_res_block_size": None},
    )
    convert(str(plain), str(tmp_path / "zero"), zero_queries_block_size=3)
    prompts = fresh_prompts((5, 40, 180))
    jobs = [engine_job(plain, prompts, None), engine_job(tmp_path / "zero", prompts, "two_phase")]
    wanted, found = run_engine(jobs, tmp_path / "run")["results"]
    check_alike(wanted, found)
    check_executed(found, "two_phase", compiled=False)


def test_in_every_way(tmp_path, record_property):
    random.seed()
    check_every_way("alice_ai", tmp_path, record_property)


def test_the_house_format_of_a_golden_is_the_same_model(tmp_path):
    convert(str(GOLDEN), str(tmp_path / "house"), to_house=True)
    job = {
        "served": str(tmp_path / "house"),
        "reference": str(GOLDEN),
        "prompts": fresh_prompts((40,)),
        "chosen": {"attnres_algorithm": "two_phase"},
        "dtype": "float32",
    }
    (report,) = run_verify([job], tmp_path / "run")
    assert report["holds"], report
