"""A child process: ended with its context, with whoever started it, and with all that it began."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from attnres_serve.start import child

SLEEPS = "import time; print('begun', flush=True); time.sleep(600)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
COUNTS = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
print("begun", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(len(heard))
"""
READS = "import sys; print('begun', flush=True); sys.stdin.read(); sys.exit(3)"


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(
    ("script", "has_stdin", "status"),
    [(SLEEPS, False, -signal.SIGTERM), (IGNORES, False, -signal.SIGKILL), (READS, True, 3)],
    ids=["asked", "killed", "end of its input"],
)
def test_a_process_is_ended_with_the_context(script: str, has_stdin: bool, status: int) -> None:
    stdin = subprocess.PIPE if has_stdin else None
    with child.running(python(script), 2, stdin=stdin, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n" and process.poll() is None
    assert process.returncode == status and process.stdout.closed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_does_not_wait_for_the_end_of_the_input(error: type[BaseException]) -> None:
    with (
        pytest.raises(error),
        child.running(python(SLEEPS), stdin=subprocess.PIPE) as process,
    ):
        raise error
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("error", [None, ValueError])
def test_it_is_asked_to_end_once(error: type[Exception] | None) -> None:
    """A second signal would cut off the requests that a server still answers."""
    with suppress(ValueError), child.running(python(COUNTS), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        if error is not None:
            raise error
    assert process.returncode == 1


def test_it_is_the_command_in_its_environment() -> None:
    """Whatever binds it leaves nothing behind: number, arguments, variables, search path."""
    script = "import os, sys; print(os.getpid(), sys.argv[1:], os.environ['A'], sys.flags.isolated)"
    words = [*python(script), "-x", "y z"]
    with child.running(words, env=os.environ | {"A": "b"}, stdout=subprocess.PIPE) as process:
        message = process.stdout.read().decode()
    assert message == f"{process.pid} ['-x', 'y z'] b 0\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_whoever_started_it(number: int) -> None:
    starts = f"""
import subprocess
from attnres_serve.start import child
with child.running({python(SLEEPS)!r}, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    print(process.pid, flush=True)
    process.wait()
"""
    caller = subprocess.Popen(python(starts), stdout=subprocess.PIPE)
    begun = int(caller.stdout.readline())
    caller.send_signal(number)
    caller.wait(30)
    caller.stdout.close()
    end = time.monotonic() + 30
    while time.monotonic() < end and child.members(os.getsid(0)).count(begun):
        time.sleep(0.05)
    assert not Path(f"/proc/{begun}/cmdline").exists() or not child._command(begun)


def test_one_whose_parent_has_ended_does_not_run() -> None:
    words = [sys.executable, "-IS", child.__file__, "1", *python("print('runs')")]
    done = subprocess.run(words, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_server_is_waited_for_until_it_is_healthy() -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) > 1 else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer((child.HOST, 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert child.serves(SimpleNamespace(poll=lambda: None), server.server_port)
        server.shutdown()
    assert asked == ["/health", "/health"]


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n"], ids=["nothing", "another protocol"])
def test_one_that_ends_before_is_not_healthy(answer: bytes) -> None:
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])));"
        f"c, _ = s.accept(); c.recv(999); c.sendall({answer!r})"
    )
    port = child.free_port()
    with child.running([*python(script), str(port)]) as process:
        assert not child.serves(process, port)
    assert process.returncode == 0


def test_a_session_is_ended_whole() -> None:
    """Also what ignores signals, and children of what has ended."""
    script = "trap '' TERM INT; (sleep 60 & sleep 60 &); sleep 60 & wait"
    leader = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    while len(child.members(leader.pid)) < 4:
        time.sleep(0.02)
    child.end_session(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    assert child.members(leader.pid) == []
