"""Models under edits that hold for every token: by flag, by ``PUT`` and by ``convert``.

The float64 model of the unedited checkpoint applies the edits by its own lines.  Each engine begins
with edits of every kind by flag, gets drawn ones that take their place, and then none.
"""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
import torch
from checkpoints import GOLDENS, write_baseline, write_house
from edited_oracle import mixing_sites, of_a_model, static
from goldens import (
    all_moved,
    bound,
    check_against,
    check_all_against,
    check_executed,
    farthest,
    judge_of,
)
from jobs import engine_job, fresh_prompts, run_named

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit
from attnres_serve.depth.resolved_edits import resolve
from attnres_serve.depth.sites import sites
from attnres_serve.settings import (
    ALGORITHMS,
    CHANGE_EDITS_KEY,
    EDITS_KEY,
    SHARD_KEY,
    SHARD_TOKENS_KEY,
)
from attnres_serve.verify import oracle
from attnres_serve.verify.command import edits_by_site
from tests.end_to_end.test_families import chosen

pytestmark = pytest.mark.engine

EDITS: list[dict[str, Any]] = [
    {"sites": [3, "final"], "sources": ["embedding"], "mask": True},
    {"sites": [5], "sources": ["partial"], "force": True},
    {"sites": [4], "mean": True},
    {"sites": [7], "sources": ["partial", "embedding"], "weights": [0.25, 0.75]},
    {"sites": [1, 2, 6, "final"], "scale": 0.5},
]
SHAPE = {"layers": 4, "block_size": 3, "seed": 31}
MADE: dict[str, Any] = {
    "fla": lambda folder: GOLDENS / "fla_transformer_block",
    "cumulative": lambda folder: write_baseline(folder, size=4, layers=4),
    **{
        name: lambda folder, name=name: write_house(folder, name, **SHAPE)
        for name in ("qwen3_moe", "deepseek_v2", "kimi_linear")
    },
}
WITHOUT_PREFIXES = ("kimi_linear",)
LENGTHS = (7, 190)
CHUNK = 96
FAR = 1e-4  # of a weight, as in trace_cases.py
TP = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
PP = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}
SHARDED = {SHARD_KEY: "on", SHARD_TOKENS_KEY: 8}
# Mode, options of vLLM's, settings of ours, and whether the weights are replaced first.
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "eager": ("eager", {}, {}, False),
    "compiled": ("compiled", {}, {}, False),
    "TP": ("eager", TP, {}, False),
    "sharded": ("eager", TP, SHARDED, False),
    "PP": ("eager", PP, {}, False),
    "reloaded": ("eager", {}, {}, True),
}
ALWAYS = (
    "fla, compiled, two_phase",
    "fla, PP, single_pass",
    "cumulative, eager, two_phase",
    "qwen3_moe, TP, single_pass",
    "qwen3_moe, sharded, two_phase",
    "deepseek_v2, reloaded, two_phase",
    "kimi_linear, eager, single_pass",
)
CASES = {
    f"{name}, {way}, {one}": (name, way, one) for name, way, one in product(MADE, WAYS, ALGORITHMS)
}


def marked(case: str) -> Any:
    return case if case in ALWAYS else pytest.param(case, marks=pytest.mark.exhaustive)


of_every_case = pytest.mark.parametrize("case", [*map(marked, CASES)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of the unedited checkpoints."""
    root = tmp_path_factory.mktemp("unedited")
    return {name: make(root / name) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def changing(request, folders, tmp_path_factory):
    """All jobs in one process: edits by flag and what takes their place, jobs and results."""
    random.seed()  # fresh prompts and edits; a failure prints what it needs
    jobs = {}
    for case in dict.fromkeys(chosen(request, "case")):
        name, way, algorithm = CASES[case]
        mode, options, more, reloads = WAYS[way]
        folder = folders[name]
        job = engine_job(folder, fresh_prompts(LENGTHS), algorithm, mode, chunk=CHUNK, **options)
        job["settings"] = {EDITS_KEY: EDITS, CHANGE_EDITS_KEY: "on", **more}
        job["puts"] = [drawn(name, folder), []]
        job["reload"] = str(folder) if reloads else None
        job["edits"] = resolved(folder, EDITS)
        jobs[case] = job
    return run_named(jobs, tmp_path_factory.mktemp("changing"))


def resolved(folder: Path, edits: list[dict[str, Any]]) -> list[Any]:
    """Edits of all tokens as workers take them."""
    spec = check_folder(folder).translated("it").spec
    assert spec is not None
    asked = [Edit.model_validate(edit) for edit in edits]
    # None replaces a source, and a job is JSON.
    return [edit[:4] for edit in resolve(asked, sites(spec), max(LENGTHS))]


def unedited(name: str, folder: Path):
    return oracle.load(folder) if name in ("fla", "cumulative") else tiny_sites.load(folder)


def edited(name: str, folder: Path, edits: list[dict[str, Any]]):
    """The float64 model of an unedited checkpoint, with the edits."""
    model = unedited(name, folder)
    words = [edit_text.write(Edit.model_validate(edit)) for edit in edits]
    found = edits_by_site(words, check_folder(folder).translated(name))
    return model.with_spec(replace(model.spec, edits=found))


def drawn(name: str, folder: Path) -> list[dict[str, Any]]:
    model = unedited(name, folder)
    return [*map(of_a_model, static(getattr(model, "depth", model), 1))]


@of_every_case
def test_by_flag(case, folders, changing):
    name, way, algorithm = CASES[case]
    job, result = changing[case]
    model = edited(name, folders[name], EDITS)
    check_all_against(model, job, result, name not in WITHOUT_PREFIXES)
    check_executed(result, algorithm, compiled=WAYS[way][0] == "compiled")


@of_every_case
def test_by_put(case, folders, changing):
    """The prompt was in the prefix cache of earlier edits; by the new one it is the same again."""
    name = CASES[case][0]
    job, result = changing[case]
    caches = name not in WITHOUT_PREFIXES
    longest = max(job["prompts"], key=len)
    assert len({one["version"] for one in result["puts"]}) == len(job["puts"])
    for edits, one in zip(job["puts"], result["puts"], strict=True):
        judge = judge_of(edited(name, folders[name], edits))
        assert one["first"]["cached"] == 0 and (one["cached"]["cached"] > 0) == caches
        asked = [(longest, one["first"]), (longest, one["cached"])]
        asked += zip(job["prompts"], one["alone"], strict=True)
        found = [fault for pair in asked for fault in check_against(judge, *pair, f"{edits}")]
        assert not found, "\n".join(found)


@of_every_case
def test_the_trace_says_the_same(case, folders, changing):
    """Of the unedited model under the edits of the flag."""
    name = CASES[case][0]
    job, result = changing[case]
    ids = max(job["prompts"], key=len)
    logprobs, reach = judge_of(edited(name, folders[name], EDITS))(tuple(ids))
    served = result["alone"][job["prompts"].index(ids)]
    rows = zip(result["following"], served["prompt_logprobs"], strict=True)
    for position, (found, other) in enumerate(rows):
        want = float(logprobs[position, ids[position + 1]])
        far = bound(want) + reach[position]
        assert abs(found - want) <= far and abs(found - other) <= 2 * far, position


@of_every_case
def test_statistics(case, folders, changing):
    """Means over the tokens of prompts and of answers, as the float64 model has their weights."""
    name = CASES[case][0]
    job, result = changing[case]
    for edits, one in zip(job["puts"], result["puts"], strict=True):
        found = one["statistics"]
        assert found["problem"] is None and found["weights"] == one["version"]
        answers = [answer["tokens"] for answer in one["alone"]]
        pairs = [*zip(job["prompts"], answers, strict=True)]
        counts = {"prefill": sum(LENGTHS), "decode": sum(map(len, answers))}
        assert found["tokens"] == counts and not any(found["skipped"].values())
        check_statistics(edited(name, folders[name], edits), pairs, found["sites"])


def check_statistics(model, pairs: list[tuple[list[int], list[int]]], found: list[Any]) -> None:
    each = [weights_of(one, pairs) for one in (model, *all_moved(model))]
    assert [site["index"] for site in found] == [*each[0]]
    for site in found:
        for phase in ("prefill", "decode"):
            own, *off = (weights[site["index"]][phase] for weights in each)
            reach = farthest(own, off).mean(0) + FAR
            wanted = {"mean": (own, reach), "second_moment": (own**2, 2 * reach)}
            for key, (table, far) in wanted.items():
                assert ((torch.tensor(site[phase][key]) - table.mean(0)).abs() <= far).all()
            # -w log w changes by no more than -r log r where w changes by r.
            entropy, far = (torch.special.entr(one).sum(-1) for one in (own, reach))
            assert abs(site[phase]["entropy"] - entropy.mean()) <= far
            histogram = torch.tensor(site[phase]["histogram"])
            assert histogram.sum(1).tolist() == [len(own)] * own.shape[1]


def weights_of(model, pairs) -> dict[int, dict[str, torch.Tensor]]:
    """The weights [tokens, sources] of each site that mixes, of prompts and of answers."""
    depth = getattr(model, "depth", model)
    found: dict[int, dict[str, list[torch.Tensor]]] = {
        site: {"prefill": [], "decode": []} for site in mixing_sites(depth)
    }
    for prompt, answer in pairs:
        x, y = stream(model, [*prompt, *answer])
        for site, phases in found.items():
            weights = depth.mix(site, x, y[:site])[1]
            phases["prefill"].append(weights[: len(prompt)])
            phases["decode"].append(weights[len(prompt) :])
    return {
        site: {phase: torch.cat(tables) for phase, tables in phases.items()}
        for site, phases in found.items()
    }


def stream(model, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The embedding, and what each sublayer gives."""
    if not isinstance(model, oracle.Model):
        run = model.run(ids, mix=model.mixed)
        return run.stream[0], run.outputs
    x, y = model.embed(ids), []
    for site in range(model.spec.final):
        y.append(model.sublayer(site, model.mix(site, x, y)[0]))
    return x, y


@pytest.fixture(scope="module")
def converted(request, folders, tmp_path_factory):
    root, jobs = tmp_path_factory.mktemp("converted"), {}
    for name in chosen(request, "name"):
        words = [edit_text.write(Edit.model_validate(edit)) for edit in EDITS]
        convert(str(folders[name]), str(root / name), edits=words)
        prompts = fresh_prompts(LENGTHS)
        jobs[name] = engine_job(root / name, prompts, "two_phase", chunk=CHUNK)
    return run_named(jobs, root / "run")


@pytest.mark.parametrize("name", MADE)
def test_by_convert(name, folders, converted):
    job, result = converted[name]
    model = edited(name, folders[name], EDITS)
    check_all_against(model, job, result, name not in WITHOUT_PREFIXES)
