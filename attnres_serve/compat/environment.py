"""Validation of environment variables as vLLM reads them, before it is imported."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from attnres_serve.compat import source
from attnres_serve.errors import SettingError

SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of sockets between vLLM's processes
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")  # bytes of its path
CACHE = "VLLM_CPU_KVCACHE_SPACE"
PORTS = range(65536)
SHORT = ("/tmp", "/var/tmp", "/dev/shm")
# Expected values by Python's error messages.
_EXPECTED = {
    "invalid literal for int": "a whole number",
    "could not convert string to float": "a number",
}


def make_usable() -> None:
    """Validate the environment of an engine, and correct what is possible.

    Blank variables for which vLLM needs a value are removed.  If the path of the folder for
    temporary files is too long for sockets, another folder is set.

    Raises:
        SettingError: vLLM would fail, but only after its start.
    """
    try:
        Path.cwd()
    except OSError:
        raise SettingError(
            "the working directory no longer exists; change into one that does."
        ) from None
    for name, read in _readers().items():
        if name in os.environ:
            _validate(name, os.environ[name], read)
    if letters := {"?", "#"} & {*tempfile.gettempdir()}:
        raise SettingError(
            f"the folder for temporary files (TMPDIR) is {tempfile.gettempdir()}, in which torch "
            f"takes {' and '.join(sorted(letters))} for a part of a URL; let TMPDIR name another."
        )
    if len(os.fsencode(folder := os.environ.get(SOCKETS) or tempfile.gettempdir())) > LONGEST:
        os.environ[SOCKETS] = _short_folder(folder)


def _readers() -> Mapping[str, Callable[[], object]]:
    """vLLM's functions that read variables, by name; empty if unknown."""
    try:
        readers: Mapping[str, Callable[[], object]] = source.module("envs.py").environment_variables
    except (ImportError, AttributeError):  # an unknown version
        return {}
    return readers


def _validate(name: str, value: str, read: Callable[[], object]) -> None:
    try:
        result = read()
    except ImportError:
        return
    except Exception as error:
        if not value.strip():
            del os.environ[name]
            return
        raise SettingError(f"{name} is {value!r}, {_advice(name, value, str(error))}") from None
    if name.endswith("_PORT") and isinstance(result, int) and result not in PORTS:
        raise SettingError(
            f"{name} is {value!r}, and expected is a port from 0 to {PORTS[-1]}; correct or unset "
            "it."
        )


def _advice(name: str, value: str, reason: str) -> str:
    """Advice about a value that vLLM cannot read.

    Args:
        name: of the variable.
        value: of the variable.
        reason: the message of vLLM or Python.
    """
    if re.match(r"\w+://", value):
        service = name.partition("_")[0].lower()
        return (
            f"which Kubernetes sets where a Service is called {service}; unset it, rename the "
            "Service, or set enableServiceLinks: false."
        )
    expected = next((what for text, what in _EXPECTED.items() if text in reason), None)
    if expected is None:
        return f"which vLLM cannot read ({' '.join(reason.split())}); correct or unset it."
    return f"and expected is {expected}{' of GiB' if name == CACHE else ''}; correct or unset it."


def _short_folder(folder: str) -> str:
    """A folder for sockets instead of one with a long path.

    Raises:
        SettingError: there is none, or the user set the long one.
    """
    short = next((path for path in SHORT if os.access(path, os.W_OK | os.X_OK)), None)
    if os.environ.get(SOCKETS) or short is None:
        which = SOCKETS if os.environ.get(SOCKETS) else "the folder for temporary files (TMPDIR)"
        raise SettingError(
            f"{which} is {folder}, {len(os.fsencode(folder))} bytes long; sockets need at most "
            f"{LONGEST}, so name a folder with a shorter path in {SOCKETS}."
        )
    return short
