"""A start replaces in vLLM, torch, uvicorn and starlette what the table says, and nothing else."""

import json
import runpy
import sys
from pathlib import Path

import forks
import pytest
from checkpoints import write_standard
from serving import GOLDENS, ROOT, TESTS, environment, tail

from attnres_serve.compat import patches

PAGE = ROOT / "docs" / "use" / "replaced.md"
# By vLLM's own setting for methods of workers.
EXTENSION = "vllm.v1.worker.cpu_worker:CPUWorker.__bases__"
# Whatever the model and the flags of a server on a CPU.
ALWAYS = "every model", "every model of our server", "AttnRes models", "AttnRes models on CPU"


def changed(checkpoint: Path, folder: Path, **env: str) -> set[str]:
    log, result = folder / "log", folder / "result.json"
    script = str(TESTS / "support" / "jobs" / "identity.py")
    words = sys.executable, script, str(checkpoint), str(result)
    variables = environment(PYTHONPATH=str(TESTS / "support"), **env)
    status = forks.begin(words, log, variables, env).wait(600)
    assert result.exists(), f"exit {status}:\n{tail(log)}"
    return set(json.loads(result.read_text()))


@pytest.mark.engine
@pytest.mark.versions
def test_a_start_replaces_what_the_table_says(tmp_path: Path) -> None:
    for name in ("ours", "stock"):
        (tmp_path / name).mkdir()
    model = write_standard(tmp_path / "model", base="llama", layers=2, seed=3)
    by_vllm = changed(model, tmp_path / "stock", VLLM_PLUGINS="")
    result = changed(GOLDENS / "fla_transformer_block", tmp_path / "ours") - by_vllm - {EXTENSION}
    due = [one for each in patches.table().values() for one in each if one.is_due()]
    stated = {target for one in due if not one.of for target in one.targets}
    always = {
        target for one in due if not one.of and one.models in ALWAYS for target in one.targets
    }
    assert always <= result <= stated
    assert not by_vllm & stated


def test_the_page_is_the_table() -> None:
    """``python docs/use/replaced.py`` writes it."""
    page = runpy.run_path(str(PAGE.with_suffix(".py")))["text"]()
    assert page == PAGE.read_text(encoding="utf-8")


def test_every_report_is_there() -> None:
    for each in patches.table().values():
        for one in each:
            assert (
                one.report is None
                or (ROOT / "docs" / "build" / "upstream" / f"{one.report}.md").is_file()
            )
