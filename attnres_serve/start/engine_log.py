"""What the processes of an engine write while it starts, and why it failed if it does."""

import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnres_serve.start import events, record
from attnres_serve.start.ends import how_it_ended

ROOM = 300  # characters of a library's words in a sentence
# What vLLM says in the place of a reason that another process has.
REFERRAL = re.compile("see (the )?(stack trace|root cause)|(stack trace|root cause) above", re.I)
# What vLLM writes before each line of a process, and before one that it logs.
PREFIX = re.compile(r"(\(\S+ pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
TRACEBACK = "Traceback (most recent call last)"


class EngineLog:
    """A file for what processes write, unaltered, and a pipe for the events that they tell.

    Args:
        name: what runs, as the file's name says it.

    Attributes:
        path: of the file.
        file: its descriptor.
        pipe: the descriptor that has something to read when an event was told.
        reason: why the engine failed, in a part of a sentence; None if no process told it.
        is_ours: whether the reason is a sentence of ours, to which the log adds nothing.
        is_kept: whether its file stays when it is closed.
        refusal: the sentence that refused what a server was given; None if none was read yet.
    """

    def __init__(self, name: str) -> None:
        self.file, path = tempfile.mkstemp(prefix=f"attnres-{name}-", suffix=".log")
        self.path = Path(path)
        self._events = self.path.with_suffix(".events")
        os.mkfifo(self._events, 0o600)
        # Opened for writing as well, or each process that has told something would end it.
        self.pipe = os.open(self._events, os.O_RDWR | os.O_NONBLOCK)
        self._record, self._path_of_record = record.make()
        self._rest = b""
        # What processes told last, in this order.
        self._failed: dict[int, dict[str, Any]] = {}
        self.refusal: str | None = None
        self.is_kept = False

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment of a process that tells its events here."""
        return {events.VARIABLE: str(self._events), record.VARIABLE: self._path_of_record}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Have this process, and those that it starts in the context, tell their events here."""
        before = {name: os.environ.get(name, "") for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            os.environ.update(before)

    def write(self, data: bytes) -> None:
        """Append to the file; what a full disk has no room for is lost."""
        with suppress(OSError):
            while data:
                data = data[os.write(self.file, data) :]

    @property
    def content(self) -> bytes:
        """What was written, even if somebody removed the file."""
        return os.pread(self.file, os.fstat(self.file).st_size, 0)

    def events(self) -> list[dict[str, Any]]:
        """The events that were told since the last call."""
        with suppress(BlockingIOError):
            while True:
                self._rest += os.read(self.pipe, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        events = []
        for line in lines:
            with suppress(ValueError):  # one that the pipe had no room for
                events.append(json.loads(line))
        for event in events:
            if event["event"] == "failed":
                self._failed.pop(event["pid"], None)
                self._failed[event["pid"]] = event
            elif event["event"] == "refused":
                self.refusal = event["reason"]
        return events

    def why(self, status: int) -> str:
        """Why a process that writes and tells here has ended, in a part of a sentence.

        Args:
            status: its exit status, as ``subprocess`` or a shell gives it.
        """
        if told := self.reason or (self.refusal or "").rstrip("."):
            return told
        words = first_exception(self.content) or last_line(self.content)
        return f"it {how_it_ended(status)}" + (f" after it wrote: {words}" if words else "")

    @property
    def reason(self) -> str | None:
        told = self._first_told()
        if told is None:
            return None
        is_elsewhere = refers(told["reason"])
        return (first_exception(self.content) if is_elsewhere else "") or told["reason"]

    @property
    def is_ours(self) -> bool:
        told = self._first_told()
        return told is not None and told.get("ours", False)

    def _first_told(self) -> dict[str, Any] | None:
        """The failure that came first; one that refers to another only where there is no other.

        A worker's failure makes its engine fail, and that one the server.  What a process tells
        last is what ended it.
        """
        self.events()
        failed = [*self._failed.values()]
        whole = [event for event in failed if not refers(event["reason"])]
        return next(iter([*whole, *failed]), None)

    def close(self) -> None:
        """Hear no more events, and remove the file unless it is kept."""
        os.close(self.file)
        os.close(self.pipe)
        os.close(self._record)
        self._events.unlink(missing_ok=True)
        if not self.is_kept:
            self.path.unlink(missing_ok=True)


def last_line(log: bytes) -> str:
    """The last line of a log that says something, as a part of a sentence; empty without any."""
    lines = log.decode(errors="replace").splitlines()
    return shortened(next((line for line in reversed(lines) if line.strip()), ""))


def first_exception(log: bytes) -> str:
    """The first exception with a traceback in a log, as a part of a sentence; empty without any.

    Processes write at the same time, each with its number before its lines.
    """
    begun: set[str] = set()  # processes that are writing a traceback
    for line in log.decode(errors="replace").splitlines():
        prefix = PREFIX.match(line)
        process, text = (prefix[1] or "", line[prefix.end() :]) if prefix else ("", line)
        if text.startswith(TRACEBACK):
            begun.add(process)
        elif process in begun and text[:1].strip():
            begun.remove(process)
            if not refers(text):
                return shortened(text)
    return ""


def refers(reason: str) -> bool:
    """Whether what is said of a failure is no more than that another process has the reason."""
    return REFERRAL.search(reason) is not None


def shortened(text: str) -> str:
    """As many sentences of a text as there is room for, or words of its first; the log has all."""
    text = " ".join(text.split())
    words = textwrap.shorten(text, ROOM, placeholder="", break_on_hyphens=False)
    if len(words) < len(text):
        ends = [end.start() for end in re.finditer(r"[.!?] (?=[A-Z])", f"{words} A")]
        words = words[: ends[-1]] if ends and not words.endswith(":") else words
    return (words or text[:ROOM]).rstrip(".")  # of a single word its beginning
