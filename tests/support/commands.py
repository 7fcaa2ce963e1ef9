"""Commands that tests run, and scripts that stand in for others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from forks import ROOT


def run(*words: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a command says, which must end with this status; in the root unless ``cwd`` is given."""
    options = {"cwd": ROOT, "timeout": 120} | options
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == status, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def python(source: str, *words: object, **options: Any) -> str:
    """What an interpreter of its own writes when it runs a source."""
    return run(sys.executable, "-c", source, *words, **options).stdout


def script(path: Path, text: str) -> Path:
    """A command of these lines of shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
