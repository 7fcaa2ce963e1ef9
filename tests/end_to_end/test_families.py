"""Every family that vLLM has, in the engine, against Hugging Face's own class in float64.

A new family needs an entry in ``facts`` and no test of its own.
"""

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import edited_oracle
import pytest
import tiny_sites
import torch
from checkpoints import write_house
from facts import FACTS
from goldens import all_moved, check_all_against, check_executed, farthest
from jobs import engine_job, fresh_prompts, run_engine, run_named
from kinds import KINDS

from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.families import FAMILIES
from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Rewritten
from attnres_serve.verify.rewritten import model as rewritten

pytestmark = pytest.mark.engine

STOCK = tuple(name for name, family in FAMILIES.items() if family.is_stock)
CASES = {
    f"{name} {variant}".strip(): (name, changes)
    for name in STOCK
    for variant, changes in FACTS[name].variants.items()
}
CHOSEN = dict(zip(CASES, cycle(ALGORITHMS), strict=False))
CHUNK = 96  # tokens of a step; a prompt is longer
LONGEST = 190  # tokens of a prompt
FAR = 1e-4  # float32 and float64 through eight sublayers, as in ``trace_cases``
Run = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # job and result by case
Traced = dict[int, tuple[torch.Tensor, torch.Tensor]]  # weights and magnitudes by site


def first_case(name: str) -> str:
    return next(case for case in CASES if CASES[case][0] == name)


# Its rows are of no size that vLLM has a kernel for, so our latent attention runs on every CPU.
NARROW = "deepseek_v3 narrow rows"
OF_KINDS = [*map(first_case, KINDS), NARROW]
BLOCKS = 24  # of the cache: too few for all requests, so that they get blocks which others had
EDITED = [first_case(name) for name in ("qwen3_moe", "kimi_linear")]
JUDGED = [name for name in STOCK if FAMILIES[name].has_hf_class]
OTHERS = [case for case in CASES if case not in OF_KINDS and CASES[case][0] in JUDGED]


@pytest.fixture(scope="module")
def with_mixes(request, tmp_path_factory) -> tuple[Path, Run]:
    """Serve random checkpoints of families, in one process: job and result by case."""
    random.seed()  # fresh prompts; a failure prints what it needs
    root, jobs = tmp_path_factory.mktemp("mixes"), {}
    for case in dict.fromkeys(chosen(request, "case")):
        name, changes = CASES[case]
        seed = random.randrange(10**6)
        write_house(root / case, name, layers=4, block_size=3, seed=seed, changes=changes)
        prompts, depth = fresh_prompts((7, LONGEST, 1)), tiny_sites.load(root / case).depth
        edits = [edited_oracle.by_numbers(depth, edit) for edit in edits_of(depth, case)]
        options = {"num_gpu_blocks_override": BLOCKS} if case == NARROW else {}
        jobs[case] = engine_job(
            root / case, prompts, CHOSEN[case], chunk=CHUNK, trace=True, edits=edits, **options
        )
    return root, run_named(jobs, root / "run")


def edits_of(depth: oracle.Model, case: str) -> list[edited_oracle.Edit]:
    return edited_oracle.some(depth, LONGEST) if case in EDITED else []


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """The values of a parameter in the tests of a fixture that were selected, as by ``-k``."""
    return [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames
    ]


def check_run(
    model: Rewritten, job: dict[str, Any], result: dict[str, Any], caches_prefixes: bool = True
) -> None:
    """Answers, counters and the trace of a job are those of a float64 model."""
    check_all_against(model, job, result, caches_prefixes)
    check_executed(result, job["algorithm"], compiled=job["mode"] == "compiled")
    check_trace(model, max(job["prompts"], key=len), result["trace"])


def serve_zero_queries(plain: Path, root: Path) -> tuple[dict[str, Any], Any, Any]:
    """Serve a checkpoint without sites, and its copy with queries that are zero.

    Returns:
        The copy's job, its result, and the other's.
    """
    convert(str(plain), str(root / "zero"), zero_queries_block_size=3)
    prompts = fresh_prompts((5, 40, 180))
    jobs = [engine_job(plain, prompts, None), engine_job(root / "zero", prompts, "two_phase")]
    without, found = run_engine(jobs, root / "run")["results"]
    check_executed(found, "two_phase", compiled=False)
    return jobs[1], found, without


def check_trace(model: Rewritten, ids: list[int], trace: list[list[Any]]) -> None:
    """Weights and magnitudes of every site, as the float64 model has them."""
    check_traced(traced(model, ids), [traced(one, ids) for one in all_moved(model)], trace)


def check_traced(wanted: Traced, off: Sequence[Traced], trace: list[list[Any]]) -> None:
    """``off`` are those of the models that are as far off as float32 may be."""
    assert [site for site, *_ in trace] == [*wanted]
    for site, weights, rms in trace:
        rows = zip((weights, rms), wanted[site], *(one[site] for one in off), (0, FAR), strict=True)
        for found, own, *others, relative in rows:
            # As in ``goldens.judge_of``: the norm on a recurrence's output makes small ones large.
            far = FAR + relative * own.abs() + farthest(own, others)
            assert ((torch.tensor(found) - own).abs() <= far).all()


def traced(model: Rewritten, ids: list[int], edits: Sequence[edited_oracle.Edit] = ()) -> Traced:
    """Weights and magnitudes ``[tokens, sources]`` by site, of those that mix."""
    return of_run(model, edited_run(model, ids, edits), edits)


def edited_run(
    model: Rewritten, ids: list[int], edits: Sequence[edited_oracle.Edit]
) -> rewritten.Run:
    def mixed(site: int, stream: list[torch.Tensor]) -> torch.Tensor:
        outputs = rewritten.Run(stream, stream[0]).outputs
        return edited_oracle.mix(model.depth, edits, site, stream[0], outputs)[0]

    return model.run(ids, mix=mixed if edits else model.mixed)


def of_run(model: Rewritten, run: rewritten.Run, edits: Sequence[edited_oracle.Edit]) -> Traced:
    x, y = run.stream[0], run.outputs
    found = {}
    for site in range(len(y) + 1):
        weights = edited_oracle.mix(model.depth, edits, site, x, y[:site])[1]
        if weights is not None:
            found[site] = weights, model.depth.sources(site, x, y[:site]).square().mean(-1).sqrt().T
    return found


@pytest.mark.families
@pytest.mark.parametrize("case", EDITED)
def test_an_edit_of_a_kind_is_the_float64_models(with_mixes, case):
    """Weights downstream and the logprobs of the prompt, to the rounding of each."""
    root, run = with_mixes
    job, result = run[case]
    model, ids = tiny_sites.load(root / case), max(job["prompts"], key=len)
    edits = edits_of(model.depth, case)
    runs = [edited_run(one, ids, edits) for one in (model, *all_moved(model))]
    wanted, *off = (of_run(model, one, edits) for one in runs)
    check_traced(wanted, off, result["edited"])
    following = torch.tensor(ids[1:])[:, None]
    own, *others = (one.logits.log_softmax(-1)[:-1].gather(1, following)[:, 0] for one in runs)
    found = torch.tensor(result["following"])
    assert ((found - own).abs() <= 5 * FAR + farthest(own, others)).all()
    plain = model.run(ids, mix=model.mixed).logits.log_softmax(-1)[:-1].gather(1, following)[:, 0]
    assert (plain - own).abs().max() > 0.1  # the edit matters


@pytest.mark.families
@pytest.mark.parametrize("case", [*OF_KINDS, *OTHERS])
def test_a_family_equals_hugging_faces_class_with_mixes(with_mixes, case, record_property):
    """Its first variant is what the table of families shows."""
    (root, run), (name, _) = with_mixes, CASES[case]
    job, result = run[case]
    assert job["algorithm"] == CHOSEN[case]
    check_run(tiny_sites.load(root / case), job, result, FACTS[name].caches_prefixes)
    for column in ("exact", "trace", "chunked") if case == first_case(name) else ():
        record_property("shows", (name, column))
