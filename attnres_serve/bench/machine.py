"""The machine and the versions of a measurement, without the machine's name."""

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
    """The number of cores that this process may use."""
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
    """The measured versions; a digest of this package's code identifies unreleased versions."""
    return {
        "python": platform.python_version(),
        "vllm": installed()[1],
        "torch": version("torch"),
        "attnres_serve": version("attnres-serve"),
        "attnres_serve_source": fingerprint.source(),
    }


def repeatable(command: Sequence[str], gpu: str | None = None) -> dict[str, Any]:
    """The content of a document that is needed to repeat a measurement."""
    return {
        "command": command_line(command),
        "versions": versions(),
        "hardware": hardware() | ({"gpu": gpu} if gpu else {}),
    }


def command_line(command: Sequence[str]) -> str:
    """The command line for a document."""
    return shlex.join(shown(command))


def shown(command: Sequence[str]) -> list[str]:
    """Arguments with absolute paths cut to their last part and secrets hidden."""
    result, secret = [], False
    for argument in command:
        flag, equals, value = (
            argument.partition("=") if argument.startswith("--") else ("", "", argument)
        )
        secret = flag.replace("_", "-") in SECRETS if flag else secret
        hidden = "***" if secret and (equals or not flag) else value
        hidden = re.sub('(?<=")/[^"]*/', "", hidden)  # in JSON
        result.append(flag + equals + (Path(hidden).name if Path(hidden).is_absolute() else hidden))
    return result
