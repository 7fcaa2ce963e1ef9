"""A child process: bound to its parent, waited for, and ended with all its processes.

As a script, this file binds its process to the parent and then executes the command that follows.
So it imports nothing of ours, and nothing runs between fork and exec in a process with threads.
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
POLL = 0.2  # seconds between two checks of a starting process
PATIENCE = 60.0  # seconds for a process to end after the request
LAST = 5.0  # seconds for killed processes to disappear
TRACKER = b"multiprocessing.resource_tracker"  # ends by itself after cleaning up for others


def bind_to(parent: int, number: int) -> None:
    """Send this process a signal when its parent ends for any reason.

    Args:
        parent: the process that started this one; if it has ended already, so does this one.
        number: the signal.
    """
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def running(
    command: Sequence[str], patience: float = PATIENCE, **options: Any
) -> Iterator[subprocess.Popen]:
    """A process that ends with the context, and with this process.

    If its stdin is a pipe, closing it asks the process to end.  Otherwise, or if an exception
    leaves the context, it gets SIGTERM.

    Args:
        command: its arguments.
        patience: seconds after which it is killed.
        options: of ``subprocess.Popen``.
    """
    bound = [sys.executable, "-PS", __file__, str(os.getpid()), *command]
    with subprocess.Popen(bound, **options) as process:  # closes its pipes
        by_signal = process.stdin is None
        try:
            yield process
        except BaseException:
            by_signal = True
            raise
        finally:
            if by_signal:
                process.terminate()  # once: a second signal would abort running requests
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def serves(process: subprocess.Popen, port: int, look: Callable[[], object] = lambda: None) -> bool:
    """Wait until a server is healthy; False if its process ends before.

    Args:
        process: the server.
        port: of the loopback interface.
        look: called before each check.
    """
    from http.client import OK, HTTPConnection, HTTPException

    while process.poll() is None:
        look()
        connection = HTTPConnection(HOST, port, timeout=5)
        with suppress(OSError, HTTPException), closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == OK:
                return True
        time.sleep(POLL)
    return False


def end_session(leader: int, before: Iterable[int] = ()) -> None:
    """Kill the processes of a session, and wait until they are gone.

    Multiprocessing's resource trackers survive: they clean up shared memory of the killed
    processes, and then end.

    Args:
        leader: the process that started the session.
        before: earlier processes of the session; killed ones left files in shared memory.
    """
    end = time.monotonic() + LAST
    killed = {leader, *before}
    while time.monotonic() < end:
        running_pids = [pid for pid in members(leader) if TRACKER not in _command(pid)]
        if not running_pids:
            break
        killed.update(running_pids)
        for pid in running_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in killed:
        forget_openmp(pid)


def members(leader: int) -> list[int]:
    """The running processes of a session, without zombies."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # In bytes: names of processes may be invalid text.
            state, _, _, session = path.read_bytes().rpartition(b")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state not in b"ZX":
            pids.append(int(path.parent.name))
    return pids


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def forget_openmp(pid: int) -> None:
    """Remove the shared-memory file that Intel's OpenMP leaves for a killed process."""
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").unlink(missing_ok=True)


if __name__ == "__main__":
    bind_to(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.argv[2], sys.argv[2:])
