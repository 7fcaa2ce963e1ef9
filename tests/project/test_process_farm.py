"""The process farm replaces in vLLM what its page says, and nothing where starts are a user's."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import forks
import pytest
from serving import ROOT, environment, tail

PAGE = ROOT / "docs" / "build" / "process-farm.md"
ZYGOTE = ROOT / "tests" / "support" / "zygote.py"
REPLACED = """
import gc, json, pathlib, sys
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry
from vllm.platforms import cpu
from vllm.utils import system_utils
from vllm.v1.sample.ops import logprobs

found = {
    "start method": system_utils.get_mp_context.__module__ != system_utils.__name__,
    "inspection": registry._run_in_subprocess.__module__ != registry.__name__,
    "sampler": not hasattr(logprobs.batched_count_greater_than, "__wrapped__"),
    "spin": shm_broadcast.SpinCondition.__init__.__defaults__ != (1,),
    "GiB": cpu.GiB_bytes != 1 << 30,
    "freeze": type(gc.freeze) is not type(gc.collect),
}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""


@pytest.mark.engine
def test_vllm_is_replaced_in_the_farm_alone(tmp_path: Path) -> None:
    script, log, result = (tmp_path / name for name in ("script.py", "log", "result"))
    script.write_text(REPLACED)
    words = sys.executable, str(script), str(result)
    status = forks.begin(words, log, environment(), {}).wait(300)
    assert status == 0, tail(log)
    assert {*json.loads(result.read_text()).values()} == {not forks.AS_USERS}


def test_a_users_process_is_none_of_the_farm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported before its script, whose parent is the test; OpenMP has its defaults."""
    monkeypatch.setattr(forks, "AS_USERS", True)
    for name in forks.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import os, sys; print(os.getppid(), 'vllm' in sys.modules)")
    env = environment()
    assert not forks.ONE_THREAD.keys() & env.keys()
    begun = forks.begin((sys.executable, str(script)), log, env, {})
    assert (begun.wait(60), log.read_text()) == (0, f"{os.getpid()} False\n")


def test_the_page_names_all_that_is_replaced() -> None:
    """Attributes that are assigned in the zygote, by the names of their owners."""
    targets = (
        target
        for node in ast.walk(ast.parse(ZYGOTE.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    )
    named = re.findall(r"`([\w.]+)`", PAGE.read_text(encoding="utf-8"))
    assert {ast.unparse(target) for target in targets} <= {*named}
