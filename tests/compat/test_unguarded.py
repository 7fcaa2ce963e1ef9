"""Scripts with and without a guard, which processes import that they start."""

import sys
from pathlib import Path

import pytest
from commands import run

from attnres_serve.compat import unguarded

# As of a script that makes an LLM; vLLM itself would be imported three times.
SCRIPT = """
import multiprocessing, os, sys
from types import ModuleType, SimpleNamespace

from attnres_serve.compat import unguarded

envs = SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING={in_process} == 0)
sys.modules["vllm"] = vllm = ModuleType("vllm")
vllm.envs = envs


def main():
    unguarded.end_import(SimpleNamespace(parallel_config=SimpleNamespace(world_size={world})))
    if {in_process} and {world} == 1:
        print("an engine")
    else:
        process = multiprocessing.get_context("spawn").Process(target=print, args=("an engine",))
        process.start()
        process.join()
        print("status", process.exitcode)


{guard}
    main()
"""
GUARDED, UNGUARDED = 'if __name__ == "__main__":', "if True:"


@pytest.mark.parametrize(
    ("guard", "world", "in_process", "message", "reported"),
    [
        (GUARDED, 1, 0, "an engine\nstatus 0\n", ""),
        (UNGUARDED, 1, 0, "status 1\n", f"{unguarded.SENTENCE}\n"),
        (UNGUARDED, 2, 1, "status 1\n", f"{unguarded.SENTENCE}\n"),
        (UNGUARDED, 1, 1, "an engine\n", ""),  # in this process
    ],
)
def test_a_script(
    guard: str, world: int, in_process: int, message: str, reported: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(guard=guard, world=world, in_process=in_process))
    done = run(sys.executable, path)
    assert (done.stdout, done.stderr) == (message, reported)
