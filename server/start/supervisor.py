"""``serve`` in two processes: a supervisor for signals and output, and the server.

A start imports, compiles and waits in code that handles no signal for seconds, or swallows the
exception of a handler (vLLM's, inside ZeroMQ's poll).  The supervisor imports none of that code.
It kills a starting server, and forwards signals to a ready one.  The output of the server's
processes goes to a log during the start, and is forwarded unchanged afterwards.
"""

import os
import selectors
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from attnres_serve.server.start import address, json_lines, streams
from attnres_serve.server.start.console import ENDS, Console
from attnres_serve.server.start.levels import COLOUR, wants_log
from attnres_serve.start.child import bind_to, end_session, members
from attnres_serve.start.engine_log import EngineLog

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TICK = 1.0  # seconds
ROOM = 1 << 20  # bytes, more than a pipe holds


def supervise(arguments: list[str], run: Callable[[], int]) -> int:
    """Run a server in a separate process, and return its exit status.

    SIGINT and SIGTERM may be blocked before; they are handled from here on.

    Args:
        arguments: the command line, from ``serve`` on.
        run: serves, and returns the exit status.

    Returns:
        The status of ``run``; 130 after a signal before the server was ready.  In the server's
        process, also the status of ``run``.
    """
    streams.mend()
    verbose = wants_log([word for word in arguments if word.startswith("--")], os.environ)
    if verbose and sys.stdout.isatty():  # vLLM sees a pipe
        os.environ.setdefault(COLOUR, "1")
    try:
        log = EngineLog("serve")
    except OSError as error:
        _, err = json_lines.if_configured(arguments, *streams.writers())
        err.write(
            f"attnres-serve: no temporary file can be made ({error}); let TMPDIR name a folder "
            "for them.\n"
        )
        err.close()
        return 2
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    pipes = streams.pipes()
    supervisor = os.getpid()
    with log.heard():
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            _become_server(supervisor, pipes)
            return run()
    for _, write in {*pipes.values()}:
        os.close(write)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    out, err = json_lines.if_configured(arguments, *streams.writers())
    console = Console(out, err, log, verbose)
    ends = {read: name for name, (read, _) in pipes.items()}
    try:
        return _Supervisor(child, console, log, ends).run(heard)
    finally:
        if console.socket:
            address.drop_socket(console.socket)
        out.close()
        err.close()
        log.close()


def _become_server(supervisor: int, pipes: dict[str, tuple[int, int]]) -> None:
    """Make this process the server, in a new session, so that the terminal does not signal it."""
    os.setsid()
    bind_to(supervisor, signal.SIGKILL)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(pipes[name][1], number)
    for end in {end for pipe in pipes.values() for end in pipe}:
        os.close(end)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Supervisor:
    def __init__(self, child: int, console: Console, log: EngineLog, pipes: dict[int, str]) -> None:
        self.child = child
        self.console = console
        self.log = log
        self.pipes = pipes
        self.members: set[int] = set()  # processes seen in the session
        self.selector = selectors.DefaultSelector()

    def run(self, heard: int) -> int:
        """The exit status of the server, as a shell states it."""
        for number in (heard, self.log.pipe, *self.pipes):
            self.selector.register(number, selectors.EVENT_READ)
        pid = 0
        while not pid:
            ready = [key.fd for key, _ in self.selector.select(TICK)]
            if heard in ready and self._hear(os.read(heard, 64)):
                return 130
            self._take()
            self.console.tick()
            pid, code = os.waitpid(self.child, os.WNOHANG)
        end_session(self.child, self.members)
        self._take()
        status = os.waitstatus_to_exitcode(code)
        status = status if status >= 0 else 128 - status
        self.log.is_kept = self.console.ended(status)
        return status

    def _hear(self, numbers: bytes) -> bool:
        """Handle signals; return whether one ended the start."""
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
                self.members.update(members(self.child))
                self.console.say("stopping; running requests finish, a second signal aborts them.")
            os.kill(self.child, number)
        return False

    def _take(self) -> None:
        """Pass events and output of the server's processes to the console."""
        for event in self.log.events():
            self.members.update(members(self.child))
            if event["event"] in ENDS:
                self._pass_on()  # the output before the event
            self.console.event(event)
        self._pass_on()

    def _pass_on(self) -> None:
        for pipe, name in [*self.pipes.items()]:
            with suppress(BlockingIOError):
                if data := os.read(pipe, ROOM):
                    self.console.written(data, name)
                else:
                    self.selector.unregister(pipe)
                    del self.pipes[pipe]
