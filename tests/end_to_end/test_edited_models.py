"""Models under edits that hold for every token, by flag and by ``convert``, as they are run.

The float64 model of the unedited checkpoint applies the edits by its own lines.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import GOLDENS, write_baseline, write_house
from goldens import bound, check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.depth import edit_words
from attnres_serve.depth.edits import Edit, resolve
from attnres_serve.depth.sites import sites
from attnres_serve.settings import EDITS_KEY
from attnres_serve.verify import oracle
from attnres_serve.verify.command import edits_by_site

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
TWO = {"distributed_executor_backend": "mp"}
# Family, algorithm, mode and options of vLLM's.
FLAGGED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "fla": ("fla", "two_phase", "compiled", {}),
    "fla in stages": ("fla", "single_pass", "eager", TWO | {"pipeline_parallel_size": 2}),
    "cumulative": ("cumulative", "two_phase", "eager", {}),
    "experts on two": ("qwen3_moe", "single_pass", "eager", TWO | {"tensor_parallel_size": 2}),
    "latent": ("deepseek_v2", "two_phase", "eager", {}),
    "hybrid": ("kimi_linear", "single_pass", "eager", {}),
}
CONVERTED = ("fla", "qwen3_moe")
TRACED = ("fla", "cumulative")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """All jobs in one process: the folders of the unedited checkpoints, and jobs and results."""
    root = tmp_path_factory.mktemp("edited")
    folders = {name: make(root / name) for name, make in MADE.items()}
    random.seed()  # fresh prompts; a failure prints what it needs
    jobs = {}
    for case, (name, algorithm, mode, options) in FLAGGED.items():
        asked = engine_job(folders[name], prompts(), algorithm, mode, chunk=96, **options)
        jobs[case] = asked | {"settings": {EDITS_KEY: EDITS}}
    of_latent = jobs["latent"] | {"reload": str(folders["deepseek_v2"])}
    jobs["replaced"] = of_latent
    for name in CONVERTED:
        words = [edit_words.write(Edit.model_validate(edit)) for edit in EDITS]
        convert(str(folders[name]), str(root / f"{name} edited"), edits=words)
        jobs[f"{name} converted"] = engine_job(
            root / f"{name} edited", prompts(), "two_phase", chunk=96
        )
    for name in TRACED:
        spec = check_folder(folders[name]).translated(name).spec
        assert spec is not None
        edits = resolve([Edit.model_validate(edit) for edit in EDITS], sites(spec), 190)
        # None replaces a source, and a job is JSON.
        jobs[f"{name} traced"] = engine_job(
            folders[name], prompts(), "single_pass", edits=[edit[:4] for edit in edits]
        )
    return folders, run_named(jobs, root / "run")


def prompts() -> list[list[int]]:
    return fresh_prompts((7, 190))


def edited(name: str, folder: Path):
    """The float64 model of an unedited checkpoint, with the edits."""
    is_house = name not in ("fla", "cumulative")
    model = tiny_sites.load(folder) if is_house else oracle.load(folder)
    found = edits_by_site({EDITS_KEY: EDITS}, check_folder(folder).translated(name))
    return model.with_spec(replace(model.spec, edits=found))


@pytest.mark.parametrize("case", [*FLAGGED, "replaced"])
def test_by_flag(case, served):
    folders, run = served
    name = FLAGGED["latent" if case == "replaced" else case][0]
    job, result = run[case]
    check_all_against(edited(name, folders[name]), job, result, name not in WITHOUT_PREFIXES)
    check_executed(result, job["algorithm"], compiled=job["mode"] == "compiled")


@pytest.mark.parametrize("name", CONVERTED)
def test_by_convert(name, served):
    folders, run = served
    job, result = run[f"{name} converted"]
    check_all_against(edited(name, folders[name]), job, result)


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_says_the_same(name, served):
    """Of the unedited model under the same edits."""
    folders, run = served
    job, result = run[f"{name} traced"]
    ids = max(job["prompts"], key=len)
    logprobs = edited(name, folders[name]).logprobs(ids)
    for position, found in enumerate(result["following"]):
        want = float(logprobs[position, ids[position + 1]])
        assert abs(found - want) <= bound(want), position
