"""The output of an engine's processes while it starts, and the reason if it fails."""

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

ROOM = 300  # characters of a library's message in a sentence
# vLLM's message when another process has the reason.
REFERRAL = re.compile("see (the )?(stack trace|root cause)|(stack trace|root cause) above", re.I)
# vLLM's prefix of each line of a process, and of each logged line.
PREFIX = re.compile(r"(\(\S+ pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
TRACEBACK = "Traceback (most recent call last)"


class EngineLog:
    """A file with the unaltered output of processes, and a pipe for their events.

    Args:
        name: of the command, for the file's name.

    Attributes:
        path: of the file.
        file: its descriptor.
        pipe: a descriptor that becomes readable with an event.
        reason: the reason of the engine's failure, as a part of a sentence; None if unknown.
        is_ours: whether the reason is a sentence of ours, to which the log adds nothing.
        is_kept: whether the file stays after closing.
        refusal: the sentence that refused a server's settings; None without one.
    """

    def __init__(self, name: str) -> None:
        self.file, path = tempfile.mkstemp(prefix=f"attnres-{name}-", suffix=".log")
        self.path = Path(path)
        self._events = self.path.with_suffix(".events")
        os.mkfifo(self._events, 0o600)
        # Opened for writing as well, so that it stays open when a writing process ends.
        self.pipe = os.open(self._events, os.O_RDWR | os.O_NONBLOCK)
        self._record, self._path_of_record = record.make()
        self._rest = b""
        # The last failure of each process, in order of arrival.
        self._failed: dict[int, dict[str, Any]] = {}
        self.refusal: str | None = None
        self.is_kept = False

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for a process that sends its events here."""
        return {events.VARIABLE: str(self._events), record.VARIABLE: self._path_of_record}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Receive the events of this process, and of processes that start in the context."""
        before = {name: os.environ.get(name, "") for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            os.environ.update(before)

    def write(self, data: bytes) -> None:
        """Append to the file; on a full disk the rest is lost."""
        with suppress(OSError):
            while data:
                data = data[os.write(self.file, data) :]

    @property
    def content(self) -> bytes:
        """The content of the file, even after its removal."""
        return os.pread(self.file, os.fstat(self.file).st_size, 0)

    def events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        with suppress(BlockingIOError):
            while True:
                self._rest += os.read(self.pipe, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        events = []
        for line in lines:
            with suppress(ValueError):  # cut off by a full pipe
                events.append(json.loads(line))
        for event in events:
            if event["event"] == "failed":
                self._failed.pop(event["pid"], None)
                self._failed[event["pid"]] = event
            elif event["event"] == "refused":
                self.refusal = event["reason"]
        return events

    def why(self, status: int) -> str:
        """The reason why a process of this log has ended, as a part of a sentence.

        Args:
            status: its exit status, in the convention of ``subprocess`` or a shell.
        """
        if reason := self.reason or (self.refusal or "").rstrip("."):
            return reason
        line = first_exception(self.content) or last_line(self.content)
        return f"it {how_it_ended(status)}" + (f" after it wrote: {line}" if line else "")

    @property
    def reason(self) -> str | None:
        failure = self._first_failure()
        if failure is None:
            return None
        is_elsewhere = refers(failure["reason"])
        return (first_exception(self.content) if is_elsewhere else "") or failure["reason"]

    @property
    def is_ours(self) -> bool:
        failure = self._first_failure()
        return failure is not None and failure.get("ours", False)

    def _first_failure(self) -> dict[str, Any] | None:
        """The failure that came first; one that only refers to another comes last.

        A worker's failure makes its engine fail, and then the server.  The last failure of a
        process is the one that ended it.
        """
        self.events()
        failed = [*self._failed.values()]
        whole = [event for event in failed if not refers(event["reason"])]
        return next(iter([*whole, *failed]), None)

    def close(self) -> None:
        """Close the pipe, and remove the file unless it is kept."""
        os.close(self.file)
        os.close(self.pipe)
        os.close(self._record)
        self._events.unlink(missing_ok=True)
        if not self.is_kept:
            self.path.unlink(missing_ok=True)


def last_line(log: bytes) -> str:
    """The last line of a log that is not blank, as a part of a sentence; empty without any."""
    lines = log.decode(errors="replace").splitlines()
    return shortened(next((line for line in reversed(lines) if line.strip()), ""))


def first_exception(log: bytes) -> str:
    """The first exception with a traceback in a log, as a part of a sentence; empty without any.

    Lines of several processes are interleaved; each line begins with its process.
    """
    begun: set[str] = set()  # processes within a traceback
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
    """Whether the reason of a failure only refers to another process."""
    return REFERRAL.search(reason) is not None


def shortened(text: str) -> str:
    """The first sentences of a text that fit, or the beginning of its first one."""
    text = " ".join(text.split())
    short = textwrap.shorten(text, ROOM, placeholder="", break_on_hyphens=False)
    if len(short) < len(text):
        ends = [end.start() for end in re.finditer(r"[.!?] (?=[A-Z])", f"{short} A")]
        short = short[: ends[-1]] if ends and not short.endswith(":") else short
    return (short or text[:ROOM]).rstrip(".")  # the beginning of a very long word
