"""What a server writes as JSON objects: the supervisor's lines, and what knows no logger."""

import json
import os
import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT
from supervised import CHECKED, READY, supervised

from attnres_serve.server.start import json_lines
from tests.server.test_observability import time_of

FILE = ROOT / "deploy" / "logging.json"
OBJECT = b'{"levelname": "INFO", "message": "of a logger"}'
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1\n    b()\n\nKeyError: 1'


class Kept:
    """A stream that keeps what is written."""

    def __init__(self) -> None:
        self.data, self.is_closed = b"", False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.is_closed = True


def written(*pieces: str | bytes, name: str = "stderr") -> list[dict[str, Any]]:
    """The objects that become of pieces."""
    kept: Any = Kept()
    formatter = json_lines.formatter([], {json_lines.VARIABLE: str(FILE)})
    assert formatter is not None
    stream = json_lines.JsonLines(kept, name, formatter)
    for piece in pieces:
        stream.write(piece)
    stream.close()
    assert kept.is_closed and not stream.isatty()
    return [json.loads(line) for line in kept.data.splitlines()]


@pytest.mark.parametrize(
    ("pieces", "messages"),
    [
        (["  warning: slow\n", "a\n  b\n"], ["warning: slow", "a", "b"]),
        ([b"ha", b"lf\nwh", "ours\n", b"ole\n"], ["half", "ours", "whole"]),
        ([b"no end"], ["no end"]),
        ([b"\n \n\r\n"], []),
        ([b"  0%\r 50%\r100%\r\n"], ["100%"]),
        ([b"caf\xc3\xa9 \xff\x1b[31m\x00\n"], ["caf\u00e9 \ufffd\x1b[31m\x00"]),
        ([b'{"a": 1\n', b"[1]\n", b"{}{}\n", b"12\n"], ['{"a": 1', "[1]", "{}{}", "12"]),
        ([OBJECT[:9], "ours\n", OBJECT[9:] + b"\n"], ["ours", "of a logger"]),
        ([TRACEBACK.encode() + b"\nnext\n"], [TRACEBACK, "next"]),
        ([f"E:\n{TRACEBACK}\n\n{TRACEBACK}".encode()], ["E:", TRACEBACK, TRACEBACK]),
        (
            [TRACEBACK[:60].encode() + b"\n" + OBJECT + b"\n"],
            ["of a logger", TRACEBACK[:60].rstrip()],
        ),
    ],
)
def test_every_line_is_an_object(pieces, messages) -> None:
    assert [line["message"] for line in written(*pieces)] == messages


def test_an_object_of_a_logger_stays_as_it_is() -> None:
    assert written(OBJECT + b"\n") == [json.loads(OBJECT)]


@pytest.mark.parametrize(("name", "level"), [("stdout", "INFO"), ("stderr", "WARNING")])
def test_the_fields_are_those_of_the_configuration(name, level) -> None:
    (line,) = written(b"a\n", name=name)
    assert time_of(line).utcoffset() == timedelta(0)
    del line["asctime"]
    assert line == {"levelname": level, "name": name, "process": os.getpid(), "message": "a"}


TEXT = '{"version": 1, "formatters": {"plain": {"format": "%(message)s"}}}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", TEXT, '{"formatters": {"a": {"()": "json.no"}}}']
)
def test_a_file_that_makes_no_objects_leaves_lines_alone(tmp_path: Path, text: str) -> None:
    """vLLM says what is wrong with it."""
    (tmp_path / "file").write_text(text)
    assert json_lines.formatter([], {json_lines.VARIABLE: str(tmp_path / "file")}) is None
    assert json_lines.formatter([], {json_lines.VARIABLE: str(tmp_path / "nowhere")}) is None


@pytest.mark.parametrize(
    "words", [["--log-config-file", str(FILE)], ["--port=1", f"--log_config_file={FILE}"]]
)
def test_the_flag_names_the_file_as_well(words) -> None:
    assert json_lines.formatter(words, {}) is not None
    assert json_lines.formatter(words, {json_lines.VARIABLE: "nowhere"}) is not None


PHASE = r"[\d.]+ s  import vLLM"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("events.tell('refused', reason='No.'); sys.exit(2)", ["attnres-serve: No."]),
        (
            CHECKED + "os.write(2, b'a\\nb'); sys.exit(3)",
            [
                "t",
                PHASE,
                "a",
                "b",
                r"attnres-serve: the server could not be started: it ended with .*",
            ],
        ),
        (
            CHECKED + f"events.tell('ready', **{READY}); events.tell('dead', reason='gone'); "
            "raise KeyError(1)",
            [
                *("t", PHASE, "Ready after .*", *([r"\w+ +http.*"] * 3), "curl"),
                *(r"Traceback[^$]*KeyError: 1", "attnres-serve: the server has ended: gone."),
            ],
        ),
    ],
)
@pytest.mark.parametrize("is_one", [False, True])
def test_every_line_of_a_supervisor_is_an_object(script, said, is_one) -> None:
    """Whatever becomes of its server, on two streams and on one."""
    done = subprocess.run(
        supervised(script),
        env={**os.environ, json_lines.VARIABLE: str(FILE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_one else subprocess.PIPE,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    lines += [json.loads(line) for line in (done.stderr or b"").splitlines()]
    messages = [line["message"] for line in lines]
    assert len(messages) == len(said), messages
    for wanted in said:  # two processes write at the same time
        assert any(re.fullmatch(wanted, message) for message in messages), (wanted, messages)
    assert re.fullmatch(said[-1], messages[-1])
