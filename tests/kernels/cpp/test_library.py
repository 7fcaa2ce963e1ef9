"""A start compiles libraries of the cpp backend ahead, and whoever loads one waits."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from attnres_serve.kernels.cpp import backend, library

# Takes its time, and hands over what was compiled already.
COMPILER = """#!/bin/sh
echo once >> "$COMPILED"
sleep 1
while [ "$1" != -o ]; do shift; done
cp "$MADE/$(basename "$2")" "$2"
"""
AHEAD = """
import sys
from attnres_serve.kernels.cpp import library
library.compile_ahead("float16")
print("torch" in sys.modules, library.path().exists())
library.load()
library.load("float16")
import torch
print(torch.ops.attnres_serve.cpp_single_pass.default)
"""
KILLED = """
import os, time
from pathlib import Path
from attnres_serve.kernels.cpp import library
library.compile_ahead("float16")
while not Path(os.environ["COMPILED"]).exists():
    time.sleep(0.01)
os._exit(0)
"""
UNDISTURBED = """
from attnres_serve.kernels.cpp import library
library.compile_ahead("float16")
library._AHEAD.join()
"""
# Kernels of two dtypes, the second of which come from another cache.
ONE_BY_ONE = """
import os, torch
from attnres_serve.kernels.cpp import backend
backend.prepare(torch.float16)
print(*(backend.is_ready(dtype) for dtype in backend.DTYPES))
row, bank = torch.ones(1, 8), torch.ones(1, 2, 8)
try:
    backend.add_to_row(row, bank, 1)
except RuntimeError as error:
    print(error)
os.environ["XDG_CACHE_HOME"] = os.environ["ANOTHER"]
backend.prepare(torch.float32)
backend.add_to_row(row, bank, 1)
print(bank.sum().item())
"""
# As a server does, whose engines and workers load the library.
FORK = """
import os, time
from attnres_serve.kernels.cpp import library
library.compile_ahead("float16")
time.sleep(0.3)
child = os.fork()
library.load()
library.load("float16")
if not child:
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_a_start_compiles_ahead_without_torch(tmp_path: Path) -> None:
    """Once, although the process that began it asks for it meanwhile."""
    given, compiled = slow_compiler(tmp_path)
    operator = "attnres_serve.cpp_single_pass.default"
    assert run(AHEAD, given) == ["False False", operator]
    assert run(AHEAD, given) == ["False True", operator]  # there is nothing to compile
    assert compiled.read_text() == "once\n" * 2  # the operators, and kernels of one dtype


def test_a_fork_waits_and_keeps_no_lock(tmp_path: Path) -> None:
    given, compiled = slow_compiler(tmp_path)
    assert run(FORK, given) == ["0"]
    assert compiled.read_text() == "once\n" * 2  # the operators, and kernels of one dtype


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    given, _ = slow_compiler(tmp_path)
    folder = tmp_path / "cache" / "attnres_serve"
    run(KILLED, given)
    assert [one for one in folder.iterdir() if one.is_dir()]
    run(UNDISTURBED, given)
    assert {one.suffix for one in folder.iterdir()} == {".lock", ".so"}


def test_a_dtype_is_served_once_its_kernels_are_loaded(tmp_path: Path) -> None:
    """By the operators that are loaded, wherever else there are some."""
    backend.prepare()
    shutil.copytree(library.path().parent, tmp_path / "attnres_serve")
    first, refusal, second = run(ONE_BY_ONE, {"ANOTHER": str(tmp_path)})
    assert first == "False True False"
    assert "those of them that it was prepared for" in refusal
    assert second == "24.0"  # two rows of ones, and one that was added


def slow_compiler(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Variables by which it compiles into a cache of its own, and the file that counts."""
    backend.prepare()
    compiler, compiled = tmp_path / "compiler", tmp_path / "compiled"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    given = {"CXX": shlex.quote(str(compiler)), "COMPILED": str(compiled)}
    given |= {"MADE": str(library.path().parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return given, compiled


def run(script: str, given: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | given,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()
