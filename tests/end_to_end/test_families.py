"""Every family that vLLM has, in the engine: against Hugging Face's own class in float64, and with
zero queries against plain vLLM.

A new family needs an entry in ``family_facts`` and no test of its own.
"""

import random
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import write_house, write_standard
from family_facts import FACTS
from goldens import bound, check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_engine, run_named

from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.families import FAMILIES
from attnres_serve.settings import ALGORITHMS

pytestmark = pytest.mark.engine

STOCK = tuple(name for name, family in FAMILIES.items() if family.is_stock)
KINDS = ("llama", "mistral", "qwen3_moe")  # dense, dense with windows, a mixture of experts
OTHERS = tuple(name for name in STOCK if name not in KINDS)
CASES = {
    f"{name} {variant}".strip(): (name, changes)
    for name in STOCK
    for variant, changes in FACTS[name].variants.items()
}
CHOSEN = dict(zip(CASES, cycle(ALGORITHMS), strict=False))
UNIT_SCALE = 1.0  # activations large against eps, so that n^2 eps does not matter
Run = dict[str, tuple[Any, Any]]  # two of a name: a job and its result, or two results


def cases(names: Iterable[str]) -> list[str]:
    return [case for case, (name, _) in CASES.items() if name in names]


def run_with_mixes(root: Path, names: Iterable[str]) -> tuple[Path, Run]:
    """Serve random checkpoints of families, in one process: job and result by case."""
    random.seed()  # fresh prompts; a failure prints what it needs
    jobs = {}
    for case in cases(names):
        name, changes = CASES[case]
        seed = random.randrange(10**6)
        write_house(root / case, name, layers=4, block_size=3, seed=seed, changes=changes)
        jobs[case] = engine_job(root / case, fresh_prompts((7, 190)), CHOSEN[case])
    return root, run_named(jobs, root / "run")


def run_twins(root: Path, names: Iterable[str]) -> Run:
    """Serve standard checkpoints by plain vLLM, and the same with zero queries: both results."""
    prompts, plain, ours = fresh_prompts((5, 40, 180)), [], []
    for name in names:
        _, changes = CASES[cases([name])[0]]
        folder = write_standard(
            root / name, base=name, layers=4, seed=11, scale=UNIT_SCALE, changes=changes
        )
        convert(str(folder), str(root / f"{name}_zero"), zero_queries_block_size=3)
        plain.append(engine_job(folder, prompts, None))
        ours.append(engine_job(root / f"{name}_zero", prompts, CHOSEN[cases([name])[0]]))
    wanted = run_engine(plain, root / "plain", VLLM_PLUGINS="")
    assert not wanted["plugin_loaded"]
    found = run_engine(ours, root / "ours")["results"]
    return dict(zip(names, zip(wanted["results"], found, strict=True), strict=True))


@pytest.fixture(scope="module")
def with_mixes(tmp_path_factory):
    return run_with_mixes(tmp_path_factory.mktemp("kinds"), KINDS)


@pytest.fixture(scope="module")
def others_with_mixes(tmp_path_factory):
    return run_with_mixes(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return run_twins(tmp_path_factory.mktemp("twins"), KINDS)


@pytest.fixture(scope="module")
def other_twins(tmp_path_factory):
    return run_twins(tmp_path_factory.mktemp("other_twins"), OTHERS)


def check_mixes(root: Path, run: Run, case: str) -> None:
    job, result = run[case]
    check_all_against(tiny_sites.load(root / case), job, result)
    check_executed(result, CHOSEN[case], compiled=False)


def check_twin(run: Run, name: str) -> None:
    plain, ours = run[name]
    for wanted, found in zip(plain["alone"], ours["alone"], strict=True):
        assert found["tokens"] == wanted["tokens"]
        for key in ("prompt_logprobs", "logprobs"):
            for a, b in zip(found[key], wanted[key], strict=True):
                assert abs(a - b) <= 2 * bound(b)  # each of the two may be off by one bound
    check_executed(ours, CHOSEN[cases([name])[0]], compiled=False)


@pytest.mark.parametrize("case", cases(KINDS))
def test_a_kind_equals_hugging_faces_class_with_mixes(with_mixes, case):
    check_mixes(*with_mixes, case)


@pytest.mark.families
@pytest.mark.parametrize("case", cases(OTHERS))
def test_a_family_equals_hugging_faces_class_with_mixes(others_with_mixes, case):
    check_mixes(*others_with_mixes, case)


@pytest.mark.parametrize("name", KINDS)
def test_zero_queries_of_a_kind_equal_the_original_in_plain_vllm(twins, name):
    check_twin(twins, name)


@pytest.mark.families
@pytest.mark.parametrize("name", OTHERS)
def test_zero_queries_equal_the_original_in_plain_vllm(other_twins, name):
    check_twin(other_twins, name)
