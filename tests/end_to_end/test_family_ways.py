"""A family of each kind in every way of running: compiled, on two workers, with LoRA, quantized.

The judge is Hugging Face's class in float64 with the mixes, as in ``test_families``.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import write_house
from facts import FACTS, TINY
from facts.shared import NARROW_ROWS
from jobs import engine_job, fresh_prompts, run_engine
from kinds import KINDS

from tests.end_to_end.test_families import CHUNK, JUDGED, check_run
from tests.end_to_end.test_parallel import sharded

pytestmark = pytest.mark.engine

SPLIT = "1,3"  # layers of the stages; blocks have three sublayers, so one is open in between
HALVES = "2,2"  # likewise, where every stage needs layers of both kinds
NEED_EXPERTS = ("afmoe", "glm4_moe", "glm4_moe_lite")  # vLLM refuses a stage without them
# Stages must agree on the layout of caches: tiny models of which both halves have all kinds.
IN_HALVES = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"hybrid_override_pattern": "M*M*"},
}
ROWS = {  # of latent attention, in which the variants of test_families have vLLM's own
    "deepseek_v3": NARROW_ROWS,
    "kimi_linear": {"kv_lora_rank": 128, "qk_rope_head_dim": 32},
}
TWO = {"distributed_executor_backend": "mp"}
EXPERTS = tuple(name for name in TINY if any("num_experts" in key for key in TINY[name]))


def served(root: Path, name: str, **changes: Any) -> Path:
    seed = random.randrange(10**6)
    return write_house(root / name, name, layers=4, block_size=3, seed=seed, changes=changes)


def check(name: str, folder: Path, root: Path, jobs: list[dict[str, Any]]) -> None:
    """Run the jobs in one process."""
    results = run_engine(jobs, root / "run")["results"]
    model = tiny_sites.load(folder)
    for job, result in zip(jobs, results, strict=True):
        check_run(model, job, result, FACTS[name].caches_prefixes)


def check_every_way(name: str, root: Path, record_property) -> None:
    folder, prompts = served(root, name, **ROWS.get(name, {})), fresh_prompts((7, 190))

    def job(algorithm: str, mode: str = "eager", **options: Any) -> dict[str, Any]:
        return engine_job(folder, prompts, algorithm, mode, chunk=CHUNK, trace=True, **options)

    jobs = {"TP": job("two_phase", tensor_parallel_size=2, **TWO)}
    if name in EXPERTS:
        more = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        jobs["EP"] = job("two_phase", **more, **TWO)
    if not FACTS[name].has_stages:
        jobs["compiled"] = job("single_pass", "compiled")
    else:  # stock vLLM's eager mode has no pipelines on CPU
        record_property("shows", (name, "compiled"))
        stages = job("two_phase", "compiled", pipeline_parallel_size=2, **TWO)
        both = "linear_attention" in TINY[name].get("layer_types", ())
        split = HALVES if both or name in (*NEED_EXPERTS, *IN_HALVES) else SPLIT
        stages["env"] = {"VLLM_PP_LAYER_PARTITION": split}
        if name in IN_HALVES:
            other = served(root / "halves", name, **IN_HALVES[name])
            check(name, other, other.parent, [stages | {"checkpoint": str(other)}])
            record_property("shows", (name, "PP"))
        else:
            jobs["PP"] = stages
    ways = [way for way in ("TP", "EP") if way in jobs]
    divided = [sharded(jobs[way]) for way in ways]
    check(name, folder, root, [*divided, *jobs.values()])  # that of stages leaves its variable
    for column in jobs:
        record_property("shows", (name, column))


OTHERS = [name for name in JUDGED if name not in KINDS]
MARKED = [pytest.param(name, marks=pytest.mark.families) for name in KINDS]
MARKED += [pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS]


@pytest.mark.parametrize("name", MARKED)
def test_a_family_in_every_way(name, tmp_path, record_property):
    random.seed()
    check_every_way(name, tmp_path, record_property)
