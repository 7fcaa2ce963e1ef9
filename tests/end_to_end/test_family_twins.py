"""Every family with zero queries against the original in plain vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_standard
from facts import FACTS
from goldens import check_alike, check_executed
from jobs import engine_job, fresh_prompts, run_engine

from attnres_serve.checkpoints.convert.command import convert
from tests.end_to_end.test_families import CASES, CHOSEN, STOCK, chosen, first_case
from tests.end_to_end.test_sharded_families import JUDGES

pytestmark = [pytest.mark.engine, pytest.mark.families]

UNIT_SCALE = 1.0  # activations large against eps, so that n^2 eps does not matter


@pytest.fixture(scope="module")
def twins(request, tmp_path_factory) -> dict[str, tuple[dict[str, Any], Any, Any]]:
    """Serve standard checkpoints by plain vLLM, and the same with zero queries: both results.

    The job is that of the zero queries.
    """
    root, names = tmp_path_factory.mktemp("twins"), chosen(request, "name")
    prompts, plain, ours = fresh_prompts((5, 40, 180)), [], []
    for name in names:
        _, changes = CASES[first_case(name)]
        folder = write_standard(
            root / name, base=name, layers=4, seed=11, scale=UNIT_SCALE, changes=changes
        )
        convert(str(folder), str(root / f"{name}_zero"), zero_queries_block_size=3)
        job = engine_job(folder, prompts, None, workaround=FACTS[name].workaround)
        # which plain vLLM turns on by default where it cannot run too
        job["options"]["enable_prefix_caching"] = False
        if "kv_lora_rank" in json.loads((folder / "config.json").read_text()):
            # On a CPU with AMX, plain vLLM takes kernels that have no float32.
            job["options"]["attention_backend"] = "CPU_MLA"
        plain.append(job)
        ours.append(engine_job(root / f"{name}_zero", prompts, CHOSEN[first_case(name)]))
    wanted = run_engine(plain, root / "plain", VLLM_PLUGINS="")
    assert not wanted["plugin_loaded"]
    found = run_engine(ours, root / "ours")["results"]
    return dict(zip(names, zip(ours, wanted["results"], found, strict=True), strict=True))


@pytest.mark.parametrize("name", STOCK)
def test_zero_queries_equal_the_original_in_plain_vllm(twins, name, record_property):
    job, plain, ours = twins[name]
    check_alike(JUDGES[name](Path(job["checkpoint"])), job, ours, plain)
    check_executed(ours, CHOSEN[first_case(name)], compiled=False)
    record_property("shows", (name, "twin"))
