"""Jobs that run one after the other in a process of their own."""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import forks
from serving import TESTS, environment, tail

from attnres_serve.settings import ALGORITHMS

VOCABULARY = 320  # of the checkpoints that tests write


def fresh_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def engine_job(
    checkpoint: Path,
    prompts: list[list[int]],
    algorithm: str | None,
    mode: str = "eager",
    backend: str = "cpp",
    lora: Path | None = None,
    again: Path | None = None,
    reload: Path | None = None,
    chunk: int = 0,
    answer: int = 16,  # as in the goldens
    leaves: int = 0,
    prompt_logprobs: bool = True,
    trace: bool = False,
    edits: Sequence[Any] = (),
    workaround: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A job for ``run_engine``; no algorithm for a model without AttnRes, options of vllm.LLM's."""
    return {
        "checkpoint": str(checkpoint),
        "prompts": prompts,
        "algorithm": algorithm,
        "backend": backend,
        "mode": mode,
        "chunk": chunk,
        "answer": answer,
        "leaves": leaves,
        "prompt_logprobs": prompt_logprobs,
        "options": options,
        "lora": lora and str(lora),
        "refused": None,
        "again": again and str(again),
        "reload": reload and str(reload),
        "trace": trace,
        "edits": list(edits),
        "puts": [],
        "counted": [],
        "workaround": workaround,
        "env": {},
        "settings": {},
    }


def run_engine(jobs: list[dict[str, Any]], folder: Path, **env: str) -> dict[str, Any]:
    """Run jobs one after the other in one process of ``engine.py``."""
    return _run("engine.py", jobs, folder, env)


def run_named(
    jobs: Mapping[str, dict[str, Any]], folder: Path, **env: str
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Run jobs as ``run_engine`` does: each with its result, by its name."""
    results = run_engine([*jobs.values()], folder, **env)["results"]
    return dict(zip(jobs, zip(jobs.values(), results, strict=True), strict=True))


def run_random(
    root: Path, writers: Mapping[str, Callable[..., Any]], lengths: tuple[int, ...], **options: Any
) -> dict[str, tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Write random checkpoints and serve them, by the algorithms in turn.

    Args:
        root: for their folders.
        writers: write a checkpoint into a folder by a ``seed``, by its name.
        lengths: of the prompts.
        options: see ``engine_job``.

    Returns:
        Folder, job and result by name.
    """
    random.seed()  # fresh prompts; a failure prints what it needs
    jobs = {}
    for (name, write), algorithm in zip(writers.items(), cycle(ALGORITHMS), strict=False):
        write(root / name, seed=random.randrange(10**6))
        jobs[name] = engine_job(root / name, fresh_prompts(lengths), algorithm, **options)
    return {name: (root / name, *found) for name, found in run_named(jobs, root / "run").items()}


def verify_job(
    served: Path, reference: Path, prompts: list[list[int]], **chosen: str
) -> dict[str, Any]:
    """A job for ``run_verify`` in float32, by two-phase if no settings are chosen."""
    asked = {"served": str(served), "reference": str(reference), "prompts": prompts}
    return asked | {"chosen": chosen or {"attnres_algorithm": "two_phase"}, "dtype": "float32"}


def run_verify(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run jobs one after the other in one process of ``verify_jobs.py``."""
    return _run("verify_jobs.py", jobs, folder, {})


def run_trace_jobs(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run jobs one after the other in one process of ``trace_jobs.py``."""
    return _run("trace_jobs.py", jobs, folder, {})


def run_replace_jobs(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run jobs one after the other in one process of ``replace_jobs.py``."""
    return _run("replace_jobs.py", jobs, folder, {})


def _run(script: str, jobs: list[dict[str, Any]], folder: Path, env: dict[str, str]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    log, asked, result = folder / "log", folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps(jobs))
    words = (sys.executable, str(TESTS / "support" / "jobs" / script), str(asked), str(result))
    # By vLLM's default, two workers on one memory node do not start.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables = environment(PYTHONPATH=str(TESTS / "support"), **unbound, **env)
    process = forks.begin(words, log, variables, env)
    status = process.wait(2400)  # a fraction of it on an idle machine
    assert result.exists(), f"exit {status}:\n{tail(log)}"
    return json.loads(result.read_text())
