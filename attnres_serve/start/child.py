"""A child process: bound to whoever starts it, waited for, and ended with all that it began.

As a script this file binds its process and becomes the command that follows.  So it imports nothing
of ours, and nothing runs between a fork and its exec in a process that has threads.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
POLL = 0.2  # seconds between two looks at a process that starts
PATIENCE = 60.0  # seconds for a process to end that was asked to
LAST = 5.0  # seconds for killed processes to be gone
TRACKER = b"multiprocessing.resource_tracker"  # ends by itself, once it has tidied up after others


def bind_to(parent: int, number: int) -> None:
    """Have this process get a signal when its parent ends, however that ends.

    Args:
        parent: the process that began this one; if it has ended already, so does this one.
        number: the signal.
    """
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def running(
    command: Sequence[str], patience: float = PATIENCE, **options: Any
) -> Iterator[subprocess.Popen]:
    """A process that is ended with the context, and with this process.

    It is asked to end by the end of its stdin if that is a pipe, and otherwise, or if an exception
    leaves the context, by SIGTERM.

    Args:
        command: its words.
        patience: seconds after which it is killed.
        options: of ``subprocess.Popen``.
    """
    bound = [sys.executable, "-PS", __file__, str(os.getpid()), *command]
    with subprocess.Popen(bound, **options) as process:  # which closes its pipes
        by_signal = process.stdin is None
        try:
            yield process
        except BaseException:
            by_signal = True
            raise
        finally:
            if by_signal:
                process.terminate()  # once: a second signal cuts off what a server still answers
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """A port of the loopback on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def serves(process: subprocess.Popen, port: int, look: Callable[[], object] = lambda: None) -> bool:
    """Wait until a server is healthy; False if its process ends before.

    Args:
        process: the server.
        port: of the loopback.
        look: called before each look at the server.
    """
    from http.client import OK, HTTPConnection, HTTPException

    while process.poll() is None:
        look()
        asked = HTTPConnection(HOST, port, timeout=5)
        with suppress(OSError, HTTPException), closing(asked):
            asked.request("GET", "/health")
            if asked.getresponse().status == OK:
                return True
        time.sleep(POLL)
    return False


def end_session(leader: int, before: Iterable[int] = ()) -> None:
    """Kill the processes of a session, and wait until they are gone.

    Multiprocessing's resource trackers are spared: they remove what the killed ones left in shared
    memory, and end then.

    Args:
        leader: the process that began the session.
        before: others that were in it.  If they were killed, by vLLM or not, they left something.
    """
    end = time.monotonic() + LAST
    killed = {leader, *before}
    while time.monotonic() < end:
        found = [pid for pid in members(leader) if TRACKER not in _command(pid)]
        if not found:
            break
        killed.update(found)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in killed:
        forget_openmp(pid)


def members(leader: int) -> list[int]:
    """The processes of a session that run; zombies do not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # In bytes: a process may be called anything.
            state, _, _, session = path.read_bytes().rpartition(b")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state not in b"ZX":
            found.append(int(path.parent.name))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def forget_openmp(pid: int) -> None:
    """Remove what Intel's OpenMP keeps in shared memory for a process until it ends by itself."""
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").unlink(missing_ok=True)


if __name__ == "__main__":
    bind_to(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.argv[2], sys.argv[2:])
