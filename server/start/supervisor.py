"""``serve`` in two processes: one that only listens and shows, and one that serves.

A start imports, compiles and waits in code that answers no signal for seconds, or swallows the
exception that a handler raises (vLLM's, inside ZeroMQ's poll).  The supervisor imports nothing of
it.  It ends a server that starts, hands on the signals to one that is ready, and shows what matters
of what the processes of the server write (``console``).
"""

import ctypes
import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from attnres_serve.compat import start_events
from attnres_serve.compat.workarounds.quick_exit import forget_openmp
from attnres_serve.server.start import address, streams
from attnres_serve.server.start.console import COLOUR, Console, wants_log

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
TICK = 1.0  # seconds
LAST = 5.0  # seconds for killed processes to be gone
LINGER = 0.3  # seconds for the last lines of a process that has ended
TRACKER = b"multiprocessing.resource_tracker"  # ends by itself, once it has tidied up after others


def supervise(arguments: list[str], run: Callable[[], int]) -> int:
    """Run a server in a process of its own, and return its exit status.

    SIGINT and SIGTERM may be blocked; they are heard from here on.

    Args:
        arguments: the command line, from ``serve`` on.
        run: serves, and returns the exit status.

    Returns:
        The status of ``run``; 130 after a signal before the server was ready.  In the process of
        the server it returns the status of ``run``, too.
    """
    streams.mend()
    verbose = wants_log(arguments, os.environ)
    os.environ[start_events.VARIABLE] = "1"
    if verbose and sys.stdout.isatty():  # vLLM sees a pipe
        os.environ.setdefault(COLOUR, "1")
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    pipes = {name: os.pipe() for name in ("out", "err")}
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        _become_server(supervisor, pipes)
        return run()
    for _, write in pipes.values():
        os.close(write)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    out, err = streams.writers()
    console = Console(out, err, verbose)
    ends = {name: read for name, (read, _) in pipes.items()}
    try:
        return _Supervisor(child, console).run(heard, ends)
    finally:
        if console.socket:
            address.drop_socket(console.socket)
        out.close()
        err.close()


def _become_server(supervisor: int, pipes: dict[str, tuple[int, int]]) -> None:
    """Make this process the server: in a session of its own, so that no terminal signals it."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before
        os._exit(1)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(pipes[name][1], number)
        for end in pipes[name]:
            os.close(end)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Supervisor:
    def __init__(self, child: int, console: Console) -> None:
        self.child = child
        self.console = console
        self.rest = {"out": b"", "err": b""}
        self.members: list[int] = []  # of the session, when it was asked to stop

    def run(self, heard: int, pipes: dict[str, int]) -> int:
        selector = selectors.DefaultSelector()
        selector.register(heard, selectors.EVENT_READ, "signal")
        for name, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, name)
        status, ended = None, 0.0
        while len(selector.get_map()) > 1 or status is None:
            for key, _ in selector.select(TICK if status is None else LINGER):
                if key.data == "signal":
                    if status is None and self._hear(os.read(heard, 64)):
                        return 130
                elif not self._take(key.data, os.read(key.fd, 65536)):
                    selector.unregister(key.fd)
            if status is None:
                self.console.tick()
                pid, code = os.waitpid(self.child, os.WNOHANG)
                if pid:
                    status, ended = os.waitstatus_to_exitcode(code), time.monotonic()
                    end_session(self.child, self.members)
            elif time.monotonic() - ended > LINGER:
                break
        status = status if status >= 0 else 128 - status
        self.console.ended(status)
        return status

    def _hear(self, numbers: bytes) -> bool:
        """Act on signals; returns whether the start was ended by one."""
        for number in numbers:
            if number not in SIGNALS:
                continue
            if not self.console.ready:
                self.console.say("interrupted.")
                os.kill(self.child, signal.SIGKILL)  # it may have no session yet
                end_session(self.child)
                os.waitpid(self.child, 0)
                return True
            if not self.console.stopping:
                self.console.stopping = True
                self.members = _session(self.child)
                self.console.say(
                    "stopping; running requests are answered, a second signal cuts them off."
                )
            os.kill(self.child, number)
        return False

    def _take(self, name: str, data: bytes) -> bool:
        """Hand lines on to the console; returns whether the stream goes on."""
        # "\r" alone is the end of a line that is written over; before "\n" it is part of the end.
        *lines, self.rest[name] = re.split(rb"(?<=\n)|(?<=\r)(?=[^\r\n])", self.rest[name] + data)
        if not data and self.rest[name]:
            lines.append(self.rest[name])
        for raw in lines:
            line = raw.decode(errors="replace")
            end = line[len(line.rstrip("\r\n")) :]
            end = "\n" if "\n" in end else end[:1]
            text, event = start_events.read(line.rstrip("\r\n"))
            if event is None:
                self.console.line(text, name, end)
                continue
            if text:
                self.console.line(text, name)
            self.console.event(event)
        return bool(data)


def end_session(leader: int, before: Iterable[int] = ()) -> None:
    """Kill the processes of a session, and wait until they are gone.

    Multiprocessing's resource trackers are spared: they remove what the killed ones left in shared
    memory, and end then.

    Args:
        leader: the process that began the session.
        before: others that were in it.  vLLM may have killed them, so that they left something.
    """
    end = time.monotonic() + LAST
    killed = {leader, *before}
    while time.monotonic() < end:
        found = [pid for pid in _session(leader) if TRACKER not in _command(pid)]
        if not found:
            break
        killed.update(found)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in killed:
        forget_openmp(pid)


def _session(leader: int) -> list[int]:
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
