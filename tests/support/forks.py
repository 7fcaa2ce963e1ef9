"""Processes of Python that begin with vLLM imported; ``zygote`` says how.

``as_users`` has them start without it.
"""

import atexit
import fcntl
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from as_users import AS_USERS

from attnres_serve.server.start import preload

ROOT = Path(__file__).parents[2]
# Tiny models gain nothing by a second thread, and two engines side by side would wait for each
# other's at every operator.  OpenMP reads it when it is loaded, which is before a fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Variables that are read late enough, with the values that do not say what is imported.
LATE = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_PLUGINS": "attnres"}
LATE_ANY = {  # whatever the value
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_SERVICE_NAME",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "VLLM_LOGGING_CONFIG_PATH",  # from vLLM 0.31 on
    "VLLM_PP_LAYER_PARTITION",
}


class Forked:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def without_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that tests set for themselves."""
    return {k: v for k, v in variables.items() if k not in ("TRITON_INTERPRET", "VLLM_PLUGINS")}


# As `serve` begins again, which a fork cannot; and Intel's OpenMP would bind the first thread of
# every fork to the first core.
_OWN = {"LD_PRELOAD": ":".join(map(str, preload.libraries())), "KMP_AFFINITY": "none"}


# Of the test run, whatever a test changes before the first fork.
_FIRST = without_own(os.environ)


class _Zygote:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.answers = connection.makefile()
        self.forked: list[Forked] = []
        atexit.register(self.end)
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, argv: list[str], env: dict[str, str], out: Path, err: Path) -> Forked:
        forked = Forked()
        self.forked.append(forked)
        request = {"id": len(self.forked) - 1, "argv": argv, "env": _OWN | env}
        request |= {"out": str(out), "err": str(err)}
        self.connection.sendall(json.dumps(request).encode() + b"\n")
        assert forked.has_begun.wait(300), "the zygote does not answer"
        return forked

    def _listen(self) -> None:
        for line in self.answers:
            found = json.loads(line)
            forked = self.forked[found["id"]]
            if "pid" in found:
                forked.pid = found["pid"]
                forked.has_begun.set()
            else:
                forked.returncode = found["status"]
                forked.has_ended.set()

    def end(self) -> None:
        for forked in self.forked:
            forked.kill()
        self.connection.shutdown(socket.SHUT_RDWR)


def _connected() -> socket.socket:
    """A connection to the zygote of this test run, which is started by whoever needs it first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    name = hashlib.sha256(f"{run} {ROOT}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"attnres-serve-tests-{name}")
    connection = socket.socket(socket.AF_UNIX)
    with open(__file__) as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        try:
            connection.connect(str(path))
        except OSError:  # there is none, or it has ended
            path.unlink(missing_ok=True)
            with socket.create_server(str(path), family=socket.AF_UNIX) as listening:
                process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("zygote.py")), str(path)],
                    stdin=listening,
                    cwd=ROOT,
                    env=_FIRST | _OWN | LATE | ONE_THREAD,
                )
            atexit.register(process.wait)
            connection.connect(str(path))
    return connection


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote(_connected())


def _can_have(env: Mapping[str, str]) -> bool:
    """False if a variable is among them that is read while vLLM, torch or Triton are imported."""
    return all(name in LATE_ANY or LATE.get(name) == value for name, value in env.items())


def begin(
    arguments: Sequence[str],
    log: Path,
    env: dict[str, str],
    own: Mapping[str, str],
    fresh: bool = False,
) -> Forked | subprocess.Popen:
    """Begin a process: forked if it is one of this Python's that may be, else started anew.

    Args:
        arguments: the command line.
        log: file for its output.
        env: all variables.
        own: those among them that are not as for most processes.
        fresh: start it anew.
    """
    if arguments[0] == sys.executable and not fresh and _can_have(own):
        return python(*arguments[1:], log=log, env=env)
    return _anew(list(arguments), log, env, None)


def _anew(
    arguments: list[str], log: Path, env: dict[str, str], err: Path | None
) -> subprocess.Popen:
    with ExitStack() as files:
        output = files.enter_context(log.open("w"))
        errors = files.enter_context(err.open("w")) if err else subprocess.STDOUT
        process = subprocess.Popen(arguments, stdout=output, stderr=errors, env=env, cwd=ROOT)
    atexit.register(process.kill)  # of a run that was cut off
    return process


def python(
    *words: str, log: Path, env: dict[str, str], err: Path | None = None
) -> Forked | subprocess.Popen:
    """Begin ``python *words`` in the repository's folder, with vLLM imported.

    Args:
        words: the command line.
        log: file for stdout, and for stderr where ``err`` is none of its own.
        env: all variables; none that is read by imports may differ from those of most processes.
        err: file for stderr.
    """
    if not AS_USERS:
        return _zygote().fork(list(words), env, log, err or log)
    return _anew([sys.executable, *words], log, env, err)
