"""Lines as JSON objects, where the configuration of vLLM's log has them: all that is written.

Loggers write such objects themselves.  Here are those who know no logger: the phases of a start,
warnings and tracebacks of Python's, and libraries that write to a descriptor.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from logging.config import DictConfigurator
from typing import Any

from attnres_serve.server.start.streams import Writer

VARIABLE, FLAG = "VLLM_LOGGING_CONFIG_PATH", "--log-config-file"
TRACEBACK = b"Traceback (most recent call last)"
LEVELS = {"stdout": logging.INFO, "stderr": logging.WARNING}


def formatter(words: Sequence[str], environment: Mapping[str, str]) -> logging.Formatter | None:
    """The formatter of the configuration that makes JSON; None if none does.

    What is wrong with the file, vLLM says.

    Args:
        words: the command line, whose flag comes before the variable.
        environment: its variables.
    """
    path = environment.get(VARIABLE, "")
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == FLAG:
            path = value or following
    try:
        with open(path, encoding="utf-8") as file:
            configurator = DictConfigurator(json.load(file))
        for found in configurator.config.get("formatters", {}).values():
            if "json" in str(found.get("()") or found.get("class")).lower():
                made: logging.Formatter = configurator.configure_formatter(found)
                return made
    except Exception:
        return None
    return None


def where_asked(
    words: Sequence[str], out: Writer, err: Writer
) -> "tuple[Writer | JsonLines, Writer | JsonLines]":
    """Streams for stdout and stderr whose lines are objects, if the configuration makes such."""
    made = formatter(words, os.environ)
    if made is None:
        return out, err
    first = JsonLines(out, "stdout", made)
    return first, first if err is out else JsonLines(err, "stderr", made)


class JsonLines:
    """A stream whose lines become JSON objects; those that are stay as they are.

    A traceback is one object.

    Args:
        stream: what the lines are written to.
        name: ``stdout`` or ``stderr``, which the objects have for the name of a logger.
        formatter: makes an object of a record.
    """

    def __init__(self, stream: Writer, name: str, formatter: logging.Formatter) -> None:
        self._stream = stream
        self._name = name
        self._formatter = formatter
        self._rest = b""
        self._traceback: list[bytes] = []

    def isatty(self) -> bool:
        """A program reads it, whatever it is."""
        return False

    def write(self, data: str | bytes) -> None:
        """Write lines of our own, or of others those that end.

        A begun one waits for its end.  A piece without bytes is the end, as it is of a file.
        """
        if isinstance(data, str):
            for line in data.splitlines():
                self._write(line.strip())
            return
        *ended, self._rest = (self._rest + data).split(b"\n")
        for raw in ended:
            self._take(raw.rstrip(b"\r").rpartition(b"\r")[2])  # of a bar its last state
        if not data:
            rest, self._rest = self._rest, b""
            self._take(rest)
            self._end_traceback()

    def close(self) -> None:
        """Write what waits, and close the stream."""
        self.write(b"")
        self._stream.close()

    def _take(self, line: bytes) -> None:
        if _is_object(line):
            self._stream.write(line + b"\n")
        elif self._traceback or TRACEBACK in line:
            self._traceback.append(line)
            if line.strip() and not line.startswith(b" ") and TRACEBACK not in line:
                self._end_traceback()  # by the exception
        elif line.strip():
            self._write(line.decode(errors="replace"))

    def _end_traceback(self) -> None:
        if self._traceback:
            self._write(b"\n".join(self._traceback).decode(errors="replace").rstrip())
            self._traceback = []

    def _write(self, text: str) -> None:
        record = logging.LogRecord(self._name, LEVELS[self._name], "", 0, text, None, None)
        text = self._formatter.format(record)
        self._stream.write(text.encode(errors="backslashreplace") + b"\n")


def _is_object(line: bytes) -> bool:
    try:
        found: Any = line.startswith(b"{") and json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict)
