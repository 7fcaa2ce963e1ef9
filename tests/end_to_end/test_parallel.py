"""Goldens on several workers: tensor parallel, and pipelines split anywhere, also in a block."""

import itertools
from collections import Counter

import pytest
from facts import FACTS
from goldens import check_executed, check_job, expected
from jobs import engine_job, run_engine
from serving import FAMILY_GOLDENS, GOLDENS

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.families import FAMILIES
from attnres_serve.families.footprint import expert_layers
from attnres_serve.settings import ALGORITHMS
from tests.end_to_end.test_goldens import check_trace

pytestmark = pytest.mark.engine

BLOCK = "fla_transformer_block"


def spec_of(golden: str) -> AttnResSpec:
    parsed = check_folder(GOLDENS / golden).parsed
    assert parsed is not None and parsed.spec is not None
    return parsed.spec


LAYERS = {path.name: spec_of(path.name).layout.num_layers for path in sorted(GOLDENS.iterdir())}
SPLITS = {golden: range(1, layers) for golden, layers in LAYERS.items()}
KINDS = ("alone", "batch", "cached")  # of answers
STEPS = (41, 5)  # tokens of a step that is divided, and of one that is not
IN_MID_BLOCK = 3  # layers of the first stage, in the golden with blocks of two layers


def job(golden: str, algorithm: str, mode: str, **options) -> dict:
    prompts = [case["prompt"] for case in expected(GOLDENS / golden)]
    options = {"distributed_executor_backend": "mp", **options}
    return engine_job(GOLDENS / golden, prompts, algorithm, mode, **options)


def pipeline(golden: str, first: int, algorithm: str, mode: str = "compiled", **options) -> dict:
    """The first stage has ``first`` layers."""
    partition = {"VLLM_PP_LAYER_PARTITION": f"{first},{LAYERS[golden] - first}"}
    options |= {"pipeline_parallel_size": 2}
    return job(golden, algorithm, mode, **options) | {"env": partition}


def sharded(whole: dict, least: int = 8) -> dict:
    """A job with sites sharded in all but the smallest steps."""
    chosen = {f"attnres_{key}": whole[key] for key in ("algorithm", "backend")}
    chosen |= {"attnres_shard_sites": "on", "attnres_shard_tokens": least}
    return whole | {"options": whole["options"] | {"additional_config": chosen}}


def check(jobs: list[dict], golden: str, folder, **env: str) -> list[dict]:
    """Run the jobs in one process, check every answer, and return the results."""
    results = run_engine(jobs, folder, **env)["results"]
    for asked, result in zip(jobs, results, strict=True):
        check_job(result, expected(GOLDENS / golden))
        check_executed(result, asked["algorithm"], compiled=asked["mode"] == "compiled")
    return results


@pytest.mark.versions
def test_a_stage_that_starts_inside_a_block(tmp_path):
    """Its sites are traced, too, although the code that answers is compiled; or it is eager."""
    asked = pipeline(BLOCK, IN_MID_BLOCK, "two_phase") | {"trace": True}
    eager = pipeline(BLOCK, IN_MID_BLOCK, "single_pass", "eager")
    result, _ = check([asked, eager], BLOCK, tmp_path)
    check_trace(GOLDENS / BLOCK, max(asked["prompts"], key=len), result)


@pytest.mark.exhaustive
def test_stages_load_their_own_code(tmp_path):
    """From one cache, where a split is moved and moved back."""
    jobs = [pipeline(BLOCK, first, "single_pass") for first in (2, 3, 2, 3)]
    check(jobs, BLOCK, tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    log = (tmp_path / "log").read_text()
    assert log.count("Directly load AOT compilation") == 2 * 2  # both stages of the last two


@pytest.mark.exhaustive
@pytest.mark.parametrize("golden", LAYERS)
def test_tensor_parallel(golden, tmp_path):
    """Every algorithm, eager and compiled, with sites whole and sharded."""
    ways = [*itertools.product(ALGORITHMS, ("eager", "compiled"))]
    jobs = [job(golden, *way, tensor_parallel_size=2) for way in ways]
    check([*jobs, *map(sharded, jobs)], golden, tmp_path)


ODD_STEPS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 47, "max_num_seqs": 8}


def test_sharded_sites(tmp_path):
    """To the bit what whole sites give, as two parts have one sum, and the weights of a trace.

    Steps have odd numbers of tokens, or are of decode.
    """
    whole = job(BLOCK, "two_phase", "eager", **ODD_STEPS)
    whole["counted"] = STEPS
    jobs = [whole, sharded(whole) | {"trace": True}]
    results = check(jobs, BLOCK, tmp_path)
    assert [results[0][kind] for kind in KINDS] == [results[1][kind] for kind in KINDS]
    check_asked(GOLDENS / BLOCK, *results)
    check_trace(GOLDENS / BLOCK, max(whole["prompts"], key=len), results[1])
    log = (tmp_path / "log").read_text()
    assert log.count("sites sharded from 8 tokens on: a bank of 24.6 kB instead of 48.1 kB") == 2


def check_asked(golden, whole: dict, divided: dict) -> None:
    """What workers ask of each other in a step, and its banks, as docs/use/scaling.md has it.

    In a small step that is what they ask with whole sites.
    """
    parsed = check_folder(golden).parsed
    experts = expert_layers(FAMILIES[parsed.family].shapes(parsed.config))
    sites, row = parsed.spec.num_sublayers, parsed.config["hidden_size"] * 4
    tokens, sums = STEPS[0], sites - len(experts)
    bank = tokens * (parsed.spec.num_blocks + 1) * row
    for before, after in zip(whole["asked"][0], divided["asked"][0], strict=True):
        more = {key: after.get(key, 0) - before.get(key, 0) for key in (*before, *after)}
        assert more.pop("bank") == bank * (tokens + 1) / 2 / tokens - before["bank"]
        assert more == {"reduce_scatter": sums, "all_gather": sites, "all_reduce": -sums}
        assert before["bank"] == bank
    assert whole["asked"][1] == divided["asked"][1]


def check_asked_in_graphs(eager: dict, compiled: dict) -> None:
    """The same between the two steps: of a graph only what sites ask for is counted."""
    for steps in zip(*eager["asked"], *compiled["asked"], strict=True):
        many, few, of_graph, few_of_graph = map(Counter, steps)
        many.subtract(few)
        of_graph.subtract(few_of_graph)
        assert of_graph == many
        assert not few_of_graph["reduce_scatter"]


@pytest.mark.families
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_sharded_sites_compiled(backend, tmp_path):
    """The torch backend keeps the tensors that a site is given, the other copies them."""
    whole = job(BLOCK, "single_pass", "compiled", backend=backend, **ODD_STEPS)
    check([sharded(whole)], BLOCK, tmp_path)


@pytest.mark.families
def test_small_steps_of_compiled_code(tmp_path):
    """To the bit what whole sites give, where a step can be divided and where none can."""
    whole = job(BLOCK, "single_pass", "compiled", **ODD_STEPS)
    largest = ODD_STEPS["max_num_batched_tokens"]
    results = check([whole, *(sharded(whole, largest + n) for n in (0, 1))], BLOCK, tmp_path)
    few = [n for n, prompt in enumerate(whole["prompts"]) if len(prompt) < largest]
    alone = [[result["alone"][n] for n in few] for result in results]
    assert len(few) == 2 and alone[0] == alone[1]
    assert [results[0][kind] for kind in KINDS] == [results[2][kind] for kind in KINDS]
    log = (tmp_path / "log").read_text()
    assert log.count(f"no sites sharded: no step has {largest + 1} tokens") == 2


@pytest.mark.families
@pytest.mark.parametrize(
    "golden",
    [
        GOLDENS / BLOCK,
        *(FAMILY_GOLDENS / name for name in ("qwen3_moe", "deepseek_v3")),
        *(FAMILY_GOLDENS / name for name in ("kimi_linear", "kimi_k3", "alice_ai")),
    ],
    ids=lambda golden: golden.name,
)
def test_sharded_sites_of_a_family(golden, tmp_path):
    """Every algorithm, eager, where they give to the bit what whole sites give, and compiled."""
    cases, base = expected(golden), check_folder(golden).parsed.family
    caches = FACTS[base].caches_prefixes
    prompts = [case["prompt"] for case in cases]
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    jobs = []
    for algorithm in ALGORITHMS:
        whole = engine_job(golden, prompts, algorithm, chunk=47, **two) | {"counted": STEPS}
        jobs += [whole, sharded(whole), sharded(whole) | {"mode": "compiled"}]
    results = run_engine(jobs, tmp_path)["results"]
    for result in results:
        check_job(result, cases, caches)
    for whole, divided, compiled in (results[:3], results[3:]):
        assert [whole[kind] for kind in KINDS] == [divided[kind] for kind in KINDS]
        check_asked(golden, whole, divided)
        check_asked_in_graphs(divided, compiled)


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("golden", LAYERS)
def test_pipeline_parallel(golden, algorithm, tmp_path):
    """Every split."""
    check([pipeline(golden, first, algorithm) for first in SPLITS[golden]], golden, tmp_path)


@pytest.mark.exhaustive
def test_tensor_and_pipeline_parallel(tmp_path):
    """Four workers on two cores: what two stages hand on is alike on both of their ranks."""
    both = pipeline(BLOCK, IN_MID_BLOCK, "two_phase", tensor_parallel_size=2)
    check([both], BLOCK, tmp_path)


def test_splits_lie_inside_blocks_and_between_them():
    """After an odd number of layers the second stage's first site receives a partial sum."""
    first_sites = sites(spec_of(BLOCK))[2:-1:2]
    inside = [not site.opens_block and site.reads_partial for site in first_sites]
    assert inside == [True, False, True, False]
    assert inside[IN_MID_BLOCK - 1]
