"""Output of a server for a person: a start in a dozen lines, requests, warnings and errors.

The supervisor (``supervisor``) hands over every line that the processes of the server write, and
the events among them (``start_events``).  vLLM's whole log is shown where it is asked for.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from signal import SIGINT, SIGTERM
from typing import Any, Protocol

from attnres_serve.compat import log_lines
from attnres_serve.server.start import lines

# Events that end a phase of the start, and the name of the phase.
PHASES = {
    "imported": "import vLLM",
    "built": "start the engine",
    "loaded": "load the weights",
    "warm": "compile, warm up",
    "ready": "first request",
}
# Flags and variables by which somebody asks for vLLM's log.
FLAGS = ("--verbose", "--log-", "--logging-config", "--uvicorn-log-", "--enable-log")
VARIABLES = ("VLLM_LOG_", "VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING", "VLLM_TRACE_FUNCTION")
COLOUR = "VLLM_LOGGING_COLOR"  # asks for no more than its name

_REQUEST = re.compile(r'^(?:\S+ )?\S+ - "[A-Z]+ \S+ HTTP/[\d.]+" \d+')
# Warnings of every start on CPU, or of every stop, that ask nobody to do anything.
_USUAL = re.compile(
    "Found ulimit of|Triton is not installed|requires Triton|Reset SSM cache type|LD_PRELOAD"
    "|Inductor compilation was disabled|Enforce eager set|Triton is installed|reduce_op. is depr"
    r"|NUMA binding: Using|\[shutdown\]"
    # What `check` says beside the types that are stored and served; and advice for one client.
    r"|Attempted to load weight \S+ with dtype \S*float\d+ into|template requires system-first"
    "|^Default vLLM sampling parameters have been overridden"
    # A container's: the image has no Triton, and no capability to move pages.
    r"|^Triton not available|numa_migrate_pages failed\. errno: 1 "
)
ERRORS = ("ERROR", "CRITICAL")
WARNINGS = 3  # of vLLM's while the server starts; the others are counted
ERROR_LINES = 40
RAW_LINES = 15


def wants_log(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """True if a command line or the environment asks for vLLM's whole log."""
    return any(word.replace("_", "-").startswith(FLAGS) for word in arguments) or any(
        name.startswith(VARIABLES) and name != COLOUR for name in environment
    )


class Stream(Protocol):
    """A stream that a console writes to."""

    def isatty(self) -> bool: ...

    def write(self, text: str, /) -> object: ...


class Console:
    """Shows a server on the streams of the supervisor.

    Args:
        out, err: the streams.
        verbose: whether to show every line as it is, and nothing about phases.
        clock: seconds.

    Attributes:
        ready: whether the server answers requests.
        stopping: whether it was asked to end.
        socket: the file of ``--uds`` that the server has made or will make.
    """

    def __init__(
        self, out: Stream, err: Stream, verbose: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ready = False
        self.stopping = False
        self.socket: str | None = None
        self._streams: dict[str, Stream] = {"out": out, "err": err}
        self._verbose = verbose
        self._live = not verbose and out.isatty()
        self._clock = clock
        self._begin = self._since = clock()
        self._checked = False
        self._headless = False  # has no address, and answers other nodes
        self._drained = False
        self._phase = ""
        self._model = ""
        self._errors: deque[str] = deque(maxlen=1000)
        self._raw: deque[str] = deque(maxlen=1000)
        self._last: deque[str] = deque(maxlen=1000)  # lines of a stop
        self._warned: set[str] = set()
        self._more_warnings = 0
        self._told = False

    def line(self, line: str, stream: str, end: str = "\n") -> None:
        """Take a line that a process of the server wrote to its stream ``out`` or ``err``."""
        plain = log_lines.plain(line)
        level, text = log_lines.parse(plain)
        if self.stopping and lines.are_last_words(text):
            return
        own = plain.startswith("attnres-serve")
        if plain:
            self._told = own
        if not self.ready:
            self._keep(level, text, end)
        if self._verbose or own or not self._checked:
            self._write(stream, line + end)
        elif self.ready:
            if self._matters(level, text):
                self._write(stream, line + end)
            elif self.stopping and plain and level in ("", *ERRORS):
                self._last.append(line)
        elif warning := text if level == "WARNING" else lines.warning(text):
            self._warn(warning)

    def _keep(self, level: str, text: str, end: str) -> None:
        """Keep what may tell why the start fails; a line that is written over does not."""
        if level in ERRORS:
            self._errors.append(text)
        elif not level and text and end != "\r":
            self._raw.append(text)

    def _matters(self, level: str, text: str) -> bool:
        """True if a line of a server that is ready is to be shown."""
        if _REQUEST.match(text):  # those of probes are left out before (``access_log``)
            return True
        if level in ("", *ERRORS) and self.stopping and (self._drained or self._headless):
            return False  # they wait for the exit status (``ended``)
        return level in ERRORS or (
            level in ("", "WARNING") and bool(text) and not _USUAL.search(text)
        )

    def _warn(self, text: str) -> None:
        """Show a warning of the start, once; of vLLM's only the first few."""
        if text in self._warned or _USUAL.search(text):
            return
        own = text.startswith(("AttnRes", "attnres-serve"))
        if own or len(self._warned) < WARNINGS:
            self._write("err", f"  warning: {text}\n")
        else:
            self._more_warnings += 1
        if not own:
            self._warned.add(text)

    def event(self, event: dict[str, Any]) -> None:
        """Take an event of the start; the second of a kind, another worker's, is nothing new."""
        name = event["event"]
        if self.ready:
            self._drained |= name == "drained"
            return
        if name == "model":
            self._model = "".join(_aligned(*fact) for fact in event["facts"].items())
        elif name == "checked":
            self._checked, self._told = True, False
            self._verbose |= event["log"]
            self._live &= not self._verbose
            self._headless = event["headless"]
            self.socket = event["socket"]
            self._phase = next(iter(PHASES))
            if not self._verbose:
                self._write("out", f"{event['title']}\n{self._model}")
        elif name in PHASES and list(PHASES).index(name) >= self._phase_number():
            self._end_phase(name, event)
        if name == ("loaded" if self._headless else "ready"):
            self._be_ready(event)

    def _phase_number(self) -> int:
        return list(PHASES).index(self._phase) if self._phase in PHASES else 0

    def _end_phase(self, name: str, event: dict[str, Any]) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        names = list(PHASES)
        self._phase = names[min(names.index(name) + 1, len(names) - 1)]
        if self._verbose:
            return
        if "how" in event:
            self._write("out", _aligned("computed", event["how"]))
        self._write("out", f"  {PHASES[name]:<18}{seconds:5.1f} s\n")

    def _be_ready(self, event: dict[str, Any]) -> None:
        self.ready = True
        errors = [*self._errors][-ERROR_LINES:]
        if self._verbose:
            return
        if self._more_warnings:
            self._write("err", f"  {self._more_warnings} more warnings: --verbose shows them.\n")
        for text in errors:
            self._write("err", f"  error: {text}\n")
        seconds = self._clock() - self._begin
        if self._headless:
            self._write("out", f"Loaded after {seconds:.1f} s. Ctrl-C stops this node.\n")
            return
        if event["problem"]:
            self._write("err", f"  not ready: {event['problem']}\n")
        places = [("API", "/v1"), ("page", "/attn_res"), ("metrics", "/metrics")]
        where = "".join(_aligned(name, event["url"] + path) for name, path in places)
        if event["socket"]:
            where += _aligned("socket", event["socket"])
        said = f"Ready after {seconds:.1f} s. Ctrl-C stops the server.\n{where}{event['ask']}\n"
        self._write("out", said)

    def tick(self) -> None:
        """On a terminal, show the phase that runs and its seconds."""
        if self._live and self._phase and not self.ready:
            seconds = self._clock() - self._since
            self._streams["out"].write(f"\r  {PHASES[self._phase]:<18}{seconds:5.0f} s\r")

    def say(self, sentence: str) -> None:
        """Show a sentence of the command's own."""
        self._write("err", f"attnres-serve: {sentence}\n")

    def ended(self, status: int) -> None:
        """Take the end of the server, and show why where nobody wanted it.

        Args:
            status: its exit status; that of a shell where a signal ended it.
        """
        self._write("out", "")  # instead of the phase that ran
        if not self.ready:
            self._failed(status)
        elif status not in (0, 128 + SIGINT, 128 + SIGTERM):
            for line in self._last if self.stopping else ():
                self._write("err", f"{line}\n")
            if status > 128:
                self.say(f"the server {_how_it_ended(status)}.")

    def _failed(self, status: int) -> None:
        if self._told and status in (1, 2):  # one sentence said why
            return
        if status == 0 and not self._checked:  # it was asked for something else than to serve
            return
        errors = [text for text in self._errors if text.strip(" ^~")]
        raw = [text for text in self._raw if not lines.are_last_words(text)]
        if self._checked and not self._verbose:
            for text in errors[-ERROR_LINES:] + lines.without_pointers(raw)[-RAW_LINES:]:
                self._write("err", f"  {text}\n")
        more = " (--verbose shows the whole log)" if self._checked and not self._verbose else ""
        reason = log_lines.first_reason([*errors, *raw]) or f"it {_how_it_ended(status)}."
        self.say(f"the server could not be started{more}: {reason}")

    def _write(self, stream: str, text: str) -> None:
        if self._live and not self.ready:
            self._streams["out"].write("\r\x1b[K")
        if text:
            self._streams[stream].write(text)


def _how_it_ended(status: int) -> str:
    return f"was killed by signal {status - 128}" if status > 128 else f"ended with status {status}"


def _aligned(name: str, value: str) -> str:
    return f"  {name:<10}{value}\n"
