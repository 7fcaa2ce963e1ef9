"""All output as JSON objects, if the configuration of vLLM's log has them.

Loggers write such objects themselves.  This module converts the output without a logger: the phases
of a start, Python's warnings and tracebacks, and libraries that write to a file descriptor.
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


def formatter(
    command_line: Sequence[str], environment: Mapping[str, str]
) -> logging.Formatter | None:
    """The formatter of the configuration that makes JSON, or None.

    vLLM reports errors of the file.

    Args:
        command_line: its flag has precedence over the variable.
        environment: the environment variables.
    """
    path = environment.get(VARIABLE, "")
    for argument, following in zip(command_line, [*command_line[1:], ""], strict=False):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == FLAG:
            path = value or following
    try:
        with open(path, encoding="utf-8") as file:
            configurator = DictConfigurator(json.load(file))
        for config in configurator.config.get("formatters", {}).values():
            if "json" in str(config.get("()") or config.get("class")).lower():
                json_formatter: logging.Formatter = configurator.configure_formatter(config)
                return json_formatter
    except Exception:
        return None
    return None


def if_configured(
    command_line: Sequence[str], out: Writer, err: Writer
) -> "tuple[Writer | JsonLines, Writer | JsonLines]":
    """Streams for stdout and stderr, whose lines are objects if the configuration has them."""
    json_formatter = formatter(command_line, os.environ)
    if json_formatter is None:
        return out, err
    first = JsonLines(out, "stdout", json_formatter)
    return first, first if err is out else JsonLines(err, "stderr", json_formatter)


class JsonLines:
    """A stream that turns lines into JSON objects; lines that are objects are not changed.

    A traceback becomes one object.

    Args:
        stream: the stream to write to.
        name: ``stdout`` or ``stderr``, the name of the logger in the objects.
        formatter: turns a record into an object.
    """

    def __init__(self, stream: Writer, name: str, formatter: logging.Formatter) -> None:
        self._stream = stream
        self._name = name
        self._formatter = formatter
        self._rest = b""
        self._traceback: list[bytes] = []

    def isatty(self) -> bool:
        """Always False: a program reads it."""
        return False

    def write(self, data: str | bytes) -> None:
        """Write lines: text at once, and of bytes the complete lines.

        An incomplete line waits for its end.  Empty bytes are the end of the stream.
        """
        if isinstance(data, str):
            for line in data.splitlines():
                self._write(line.strip())
            return
        *ended, self._rest = (self._rest + data).split(b"\n")
        for raw in ended:
            self._take(raw.rstrip(b"\r").rpartition(b"\r")[2])  # the last state of a progress bar
        if not data:
            rest, self._rest = self._rest, b""
            self._take(rest)
            self._end_traceback()

    def close(self) -> None:
        """Write an incomplete line, and close the stream."""
        self.write(b"")
        self._stream.close()

    def _take(self, line: bytes) -> None:
        if _is_object(line):
            self._stream.write(line + b"\n")
        elif self._traceback or TRACEBACK in line:
            self._traceback.append(line)
            if line.strip() and not line.startswith(b" ") and TRACEBACK not in line:
                self._end_traceback()  # with the line of the exception
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
        content: Any = line.startswith(b"{") and json.loads(line)
    except ValueError:
        return False
    return isinstance(content, dict)
