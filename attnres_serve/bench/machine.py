"""The machine and the versions that a figure belongs to, without the machine's name."""

import os
import platform
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from attnres_serve.compat.versions import installed
from attnres_serve.kernels import fingerprint

SECRETS = ("--hf-token", "--header", "--api-key")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def hardware() -> dict[str, Any]:
    """The machine, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Versions of what is measured; a digest of this package's code says which 0.1.0 it is."""
    return {
        "python": platform.python_version(),
        "vllm": installed()[1],
        "torch": version("torch"),
        "attnres_serve": version("attnres-serve"),
        "attnres_serve_source": fingerprint.source(),
    }


def repeatable(words: Sequence[str], gpu: str | None = None) -> dict[str, Any]:
    """Content of a document by which somebody else measures the same."""
    return {
        "command": command_line(words),
        "versions": versions(),
        "hardware": hardware() | ({"gpu": gpu} if gpu else {}),
    }


def command_line(words: Sequence[str]) -> str:
    """The command to repeat a measurement, as a document may show it."""
    return shlex.join(shown(words))


def shown(words: Sequence[str]) -> list[str]:
    """Words of a command line, absolute paths cut to their last part and secrets left out."""
    found, secret = [], False
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        secret = flag.replace("_", "-") in SECRETS if flag else secret
        hidden = "***" if secret and (equals or not flag) else value
        hidden = re.sub('(?<=")/[^"]*/', "", hidden)  # in JSON
        found.append(flag + equals + (Path(hidden).name if Path(hidden).is_absolute() else hidden))
    return found
