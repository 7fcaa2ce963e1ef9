"""A start compiles the library of the cpp backend ahead, and whoever loads it waits."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from attnres_serve.kernels.cpp import backend, library

# Takes its time, and hands over what was compiled already.
COMPILER = """#!/bin/sh
echo once >> "$COMPILED"
sleep 1
while [ "$1" != -o ]; do shift; done
cp "$MADE" "$2"
"""
AHEAD = """
import sys
from attnres_serve.kernels.cpp import library
library.compile_ahead()
print("torch" in sys.modules, library.path().exists())
library.load(library.path())
import torch
print(torch.ops.attnres_serve.cpp_single_pass.default)
"""


def test_a_start_compiles_ahead_without_torch(tmp_path: Path) -> None:
    """Once, although the process that began it asks for it meanwhile."""
    backend.prepare()
    compiler, compiled = tmp_path / "compiler", tmp_path / "compiled"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    given = {"CXX": shlex.quote(str(compiler)), "COMPILED": str(compiled)}
    given |= {"MADE": str(library.path()), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def said() -> list[str]:
        command = [sys.executable, "-W", "ignore", "-c", AHEAD]
        env = os.environ | given
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    operator = "attnres_serve.cpp_single_pass.default"
    assert said() == ["False False", operator]
    assert said() == ["False True", operator]  # there is nothing to compile
    assert compiled.read_text() == "once\n"
