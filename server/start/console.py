"""The console output of a server: the phases of its start, its address, and why it failed."""

import time
from collections.abc import Callable
from signal import SIGINT, SIGTERM
from typing import Any, Protocol

from attnres_serve import sentences
from attnres_serve.start import events
from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import EngineLog
from attnres_serve.start.events import PHASES

NAMES = list(PHASES)
ENDS = ("loaded", "ready")  # the last event of a start: of a headless node, and of a server
LATE = 1.0  # seconds; a new installation reads its files for the first time
STOPPED = (0, 128 + SIGINT, 128 + SIGTERM)  # exit statuses of a server that was stopped


class Stream(Protocol):
    """A stream that a console writes to."""

    def isatty(self) -> bool: ...

    def write(self, data: str | bytes, /) -> object: ...


class Console:
    """Shows a server on the supervisor's streams, and sends events to the supervisor's parent.

    Args:
        out, err: the streams.
        log: takes the output of the server's processes during the start.
        verbose: whether the streams take that output instead of the log.
        clock: the time in seconds.

    Attributes:
        ready: whether the server answers requests.
        stopping: whether a signal stopped it.
        socket: the file of ``--uds`` that the server has made or will make.
    """

    def __init__(
        self,
        out: Stream,
        err: Stream,
        log: EngineLog,
        verbose: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ready = False
        self.stopping = False
        self.socket: str | None = None
        self._streams = {"out": out, "err": err}
        self._log = log
        self._verbose = verbose
        self._clock = clock
        self._begin = self._since = clock()
        self._checked = self._late = False
        self._headless = False  # a node without an address, which serves other nodes
        self._refused = False
        self._dead: str | None = None  # why the engine ended
        self._phase = 0
        self._model = ""
        self._warned: set[str] = set()

    @property
    def is_quiet(self) -> bool:
        """Whether the output of the server's processes goes into the log."""
        return self._checked and not self.ready and not self._verbose

    def written(self, data: bytes, stream: str) -> None:
        """Take output of a process of the server on its stream ``out`` or ``err``."""
        if self.is_quiet:
            self._log.write(data)
        else:
            self._streams[stream].write(data)

    def event(self, event: dict[str, Any]) -> None:
        """Take an event of the start; the second of a kind, from another worker, is ignored."""
        name = event["event"]
        if name == "dead":
            self._dead = self._dead or event["reason"]
        if self.ready:
            return
        if name == "model":
            self._model += "".join(_aligned(*fact) for fact in event["facts"].items())
        elif name == "checked":
            self._checked = True
            self._verbose |= event["log"]
            self._headless = event["headless"]
            self.socket = event["socket"]
            self._write("out", f"{event['title']}\n{self._model}")
            self._begin_phase(0)
        elif name == "warning" and event["text"] not in self._warned:
            self._warned.add(event["text"])
            self._write("err", f"  warning: {sentences.for_terminal(event['text'])}\n")
        elif name == "refused":
            self._refused = True
            self.say(event["reason"])
            events.tell("refused", reason=event["reason"])
        elif name in PHASES and NAMES.index(name) >= self._phase:
            self._end_phase(name, event)
        if name == ENDS[not self._headless]:
            self._be_ready(event)

    def _end_phase(self, name: str, event: dict[str, Any]) -> None:
        if "how" in event:
            self._write("out", _aligned("computed", event["how"]))
        if name != NAMES[-1]:
            self._begin_phase(NAMES.index(name) + 1)

    def _begin_phase(self, phase: int) -> None:
        """Write the phase that begins, and the seconds of the start so far."""
        self._phase, self._since = phase, self._clock()
        self._write("out", f"  {self._since - self._begin:5.1f} s  {PHASES[NAMES[phase]]}\n")

    def _be_ready(self, event: dict[str, Any]) -> None:
        self.ready = True
        seconds = self._clock() - self._begin
        if self._headless:
            self._write("out", f"Loaded after {seconds:.1f} s. Ctrl-C stops this node.\n")
            return
        if event["problem"]:
            self._show_log()
            self._write("err", f"  not ready: {event['problem']}\n")
        places = [("API", "/v1"), ("page", "/attn_res"), ("metrics", "/metrics")]
        where = "".join(_aligned(name, event["url"] + path) for name, path in places)
        if event["socket"]:
            where += _aligned("socket", event["socket"])
        if not self._verbose and self._log.content:
            where += _aligned("log", f"{self._log.path} (of the start)")
        text = f"Ready after {seconds:.1f} s. Ctrl-C stops the server.\n{where}{event['ask']}\n"
        self._write("out", text)

    def tick(self) -> None:
        """Show the seconds of the running phase on a terminal, and a slow start on any stream."""
        seconds = self._clock() - self._since
        if self.is_quiet and self._streams["out"].isatty():
            self._streams["out"].write(f"\r  for {seconds:.0f} s\r")
        elif not (self._checked or self._late) and seconds >= LATE:
            self._late = True
            self._write("err", f"  {seconds:5.1f} s  check the checkpoint\n")

    def say(self, sentence: str) -> None:
        """Show a message of the command."""
        self._write("err", f"attnres-serve: {sentences.for_terminal(sentence)}\n")

    def ended(self, status: int) -> bool:
        """Take the end of the server, and show its reason if nobody stopped it.

        Args:
            status: its exit status, as a shell states it.

        Returns:
            Whether the log is worth keeping.
        """
        for stream in self._streams.values():
            stream.write(b"")  # the end of a process's output
        self._write("out", "")  # over the running phase
        if self.ready:
            return status not in STOPPED and self._died(status)
        # A mistake was shown in one sentence; status 0 may be the help instead of a server.
        if self._refused or (not self._checked and not self._log.reason and status in (0, 1, 2)):
            return False
        begin, reason = "the server could not be started: ", self._log.why(status)
        sentence, keep = f"{begin}{reason}.", self.is_quiet
        if keep:
            if not self._log.is_ours:
                self._show_log()
            sentence = sentences.between(begin, reason, f"; its log is {self._log.path}.")
        self.say(sentence)
        events.tell("failed", reason=sentence.removeprefix(begin).rstrip("."))
        return keep

    def _died(self, status: int) -> bool:
        """Show why a ready server has ended; return whether the log is worth keeping."""
        keep = not self._verbose and bool(self._log.content)
        reason = self._dead or (self._log.reason if status < 128 else None)
        why = f"has ended: {reason}" if reason else how_it_ended(status)
        end = f"; the log of its start is {self._log.path}." if keep else "."
        sentence = sentences.between("the server ", why, end)
        self.say(sentence)
        events.tell("failed", reason=sentence.rstrip("."))
        return keep

    def _show_log(self) -> None:
        """Show the log without a terminal: the files of a container are lost with it."""
        if not self._verbose and not self._streams["err"].isatty():
            text = self._log.content
            self._streams["err"].write(text if text.endswith(b"\n") or not text else text + b"\n")

    def _write(self, stream: str, text: str) -> None:
        if self.is_quiet and self._streams["out"].isatty():
            self._streams["out"].write("\r\x1b[K")
        if text:
            self._streams[stream].write(text)


def _aligned(name: str, value: str) -> str:
    return f"  {name:<10}{value}\n"
