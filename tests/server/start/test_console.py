"""What is shown of a start and of its end, on a console and a clock of the test."""

import json
import os
import signal

import pytest
from supervised import ASK, READY, URL

from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.server.start.console import Console
from attnres_serve.server.start.levels import wants_log
from attnres_serve.start import events, failures
from attnres_serve.start.engine_log import EngineLog

FACTS = {"model": "folder", "layout": "format house, family llama, 4 blocks, 17 sites"}


class Stream:
    """A stream that keeps what is written."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.is_terminal, self.data = is_terminal, b""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, data: str | bytes) -> None:
        self.data += data.encode() if isinstance(data, str) else data

    def new(self) -> list[str]:
        """Lines since the last time."""
        said, self.data = self.data.decode(errors="replace").splitlines(), b""
        return said


class Shown:
    """A console, its streams, its log and a clock that stands still."""

    def __init__(self, log: EngineLog, verbose: bool = False, is_terminal: bool = False) -> None:
        self.out, self.err, self.now = Stream(is_terminal), Stream(is_terminal), 0.0
        self.log = log
        self.console = Console(self.out, self.err, log, verbose, lambda: self.now)

    def event(self, name: str, **facts) -> None:
        self.console.event({"event": name, **facts})

    def checked(self, log: bool = False, headless: bool = False) -> None:
        self.event("model", facts=FACTS)
        title = "attnres-serve 1, vLLM 2 on CPU"
        self.event("checked", title=title, log=log, headless=headless, socket=None)

    def start(self, **ready) -> None:
        self.checked()
        for name, more in (
            ("imported", {}),
            ("built", {"how": "algorithm single_pass, backend cpp"}),
            ("loaded", {}),
            ("warm", {}),
            ("ready", READY | ready),
        ):
            self.now += 2
            self.event(name, **more)

    def new(self) -> list[str]:
        """Lines since the last time, of both streams."""
        return self.out.new() + self.err.new()


@pytest.fixture
def shown(log) -> Shown:
    return Shown(log)


def test_a_start_is_a_dozen_lines(shown):
    shown.start()
    said = shown.new()
    assert len(said) == 14
    assert said[1:3] == ["  model     folder", f"  layout    {FACTS['layout']}"]
    assert "  computed  algorithm single_pass, backend cpp" in said
    begun = [line.strip().split(" s  ") for line in said if " s  " in line]
    assert begun == [[f"{2 * n}.0", name] for n, name in enumerate(events.PHASES.values())]
    assert "10.0 s" in said[9]
    assert said[-1] == ASK
    assert [line.split()[1] for line in said[-4:-1]] == [
        f"{URL}/v1",
        f"{URL}/attn_res",
        f"{URL}/metrics",
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_address_ends_a_start(log, verbose):
    shown = Shown(log, verbose)
    shown.checked()
    shown.console.written(b"a warning\n", "err")
    shown.new()
    shown.event("ready", **READY | {"socket": "run/s", "problem": "The request failed."})
    out, err = shown.out.new(), shown.err.new()
    where = [] if verbose else [f"  log       {log.path} (of the start)"]
    assert out[-len(where) - 2 :] == ["  socket    run/s", *where, ASK]
    assert err == ["a warning"] * (not verbose) + ["  not ready: The request failed."]


def test_other_workers_of_the_same_model_add_nothing(shown):
    shown.checked()
    for _ in range(2):
        shown.event("warning", text="AttnRes: slow")
        for name in ("imported", "built", "loaded"):
            shown.event(name, how="as it is") if name == "built" else shown.event(name)
    said = shown.new()
    assert len([line for line in said if " s  " in line]) == 4  # the last one has begun
    assert said.count("  warning: AttnRes: slow") == 1


PIECES = (
    b"WARNING 11-24 [core.py:133] watch out\r\n  File\r\n",
    b"Loading:   0%\rLoading: 100%\r\n",
    "caf\u00e9 \ufffd".encode() + b"\xff\x1b[31m",
)


@pytest.mark.parametrize("data", PIECES)
def test_what_a_start_writes_is_the_log_and_nothing_else(log, shown, data):
    shown.console.written(data, "err")  # --version, or a parser's words
    assert (shown.err.data, log.path.read_bytes()) == (data, b"")
    shown.checked()
    shown.new()
    for stream in ("out", "err"):
        shown.console.written(data, stream)
    assert shown.new() == []
    assert log.path.read_bytes() == 2 * data
    shown.event("ready", **READY)
    shown.new()
    shown.console.written(data, "out")
    assert (shown.out.data, log.path.read_bytes()) == (data, 2 * data)


@pytest.mark.parametrize("is_told", [False, True])
def test_whoever_asks_for_the_log_sees_it_as_it_is(log, is_told):
    """By the command line, or by a file of flags."""
    shown = Shown(log, verbose=not is_told)
    shown.checked(log=is_told)
    shown.new()
    for data in PIECES:
        shown.console.written(data, "out")
    assert shown.out.data == b"".join(PIECES)
    assert log.path.read_bytes() == b""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_reason_of_a_failed_start_comes_last(log, is_terminal):
    """Behind the log, where a file may be gone with its container."""
    shown = Shown(log, is_terminal=is_terminal)
    shown.checked()
    shown.new()
    for text in (b"Traceback\r\n", b"  File"):
        shown.console.written(text, "err")
    with log.heard():
        events.tell("failed", reason="ValueError: no memory")
    shown.out.new()
    assert shown.console.ended(1)
    *before, last = shown.err.new()
    assert before == ([] if is_terminal else ["Traceback", "  File"])
    assert last == (
        "attnres-serve: the server could not be started: ValueError: no memory; its log is "
        f"{log.path}."
    )


@pytest.mark.parametrize("kind", [CheckpointError, SettingError])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_sentence_of_a_worker_stands_alone(log, kind, is_terminal):
    """The traceback that vLLM writes for it is in the log."""
    shown = Shown(log, is_terminal=is_terminal)
    shown.checked()
    shown.console.written(b"Traceback\n  File\nRuntimeError: see above\n", "err")
    with log.heard():
        failures.tell(kind("the checkpoint lacks a tensor; write it anew."))
    assert shown.console.ended(1)
    assert shown.err.new() == [
        "attnres-serve: the server could not be started: the checkpoint lacks a tensor; write it "
        f"anew; its log is {log.path}."
    ]
    assert b"Traceback" in log.path.read_bytes()


def test_a_process_that_told_nothing_is_read_in_the_log(shown):
    """The first exception, not the last line."""
    shown.checked()
    shown.console.written(
        b"(Worker pid=3) Traceback (most recent call last):\n(Worker pid=3)   File\n"
        b"(Worker pid=3) OSError: [Errno 98] Address already in use\nnanobind: leaked 3\n",
        "err",
    )
    assert shown.console.ended(1)
    assert shown.err.new()[-1].startswith(
        "attnres-serve: the server could not be started: it ended with status 1 after it wrote: "
        "OSError: [Errno 98] Address already in use; its log is "
    )


def test_facts_of_a_start_come_one_after_the_other(shown):
    shown.event("model", facts=FACTS)
    shown.event("model", facts={"cores": "0|1, a part for each worker"})
    shown.event("checked", title="t", log=False, headless=False, socket=None)
    assert shown.out.new()[-2] == "  cores     0|1, a part for each worker"


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (0, "ended with status 0"),
        (143, "was ended by signal 15 (SIGTERM)"),
        (1, "ended with status 1"),
    ],
)
@pytest.mark.parametrize("words", [b"", b"a\nIllegal instruction\n\n"])
def test_every_end_of_a_start_is_told(log, shown, status, how, words):
    shown.checked()
    shown.console.written(words, "err")
    assert shown.console.ended(status)
    said = f"{how} after it wrote: Illegal instruction" if words else how
    assert shown.err.new()[-1].endswith(f": it {said}; its log is {log.path}.")


def test_an_end_before_the_checks_is_told_too(shown):
    assert not shown.console.ended(128 + signal.SIGILL)
    assert shown.new() == [
        "attnres-serve: the server could not be started: it was ended by signal 4 (SIGILL)."
    ]
    for status in (0, 2):  # --version, and a parser's own words
        assert not shown.console.ended(status)
    assert shown.new() == []


def test_a_refusal_stands_alone(shown):
    shown.checked()
    shown.new()
    shown.console.written(b"of no matter\n", "err")
    shown.event("refused", reason="found --grpc; leave it out.")
    assert not shown.console.ended(2)
    assert shown.new() == ["attnres-serve: found --grpc; leave it out."]


ENGINE = "the engine was ended by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("status", "dead", "failed", "said"),
    [
        (0, None, None, None),
        (128 + signal.SIGINT, None, None, None),
        (128 + signal.SIGTERM, ENGINE, "KeyError: 1", None),
        (128 + signal.SIGABRT, None, "KeyError: 1", "was ended by signal 6 (SIGABRT)"),
        (1, None, None, "ended with status 1"),
        (1, None, "KeyError: 1", "has ended: KeyError: 1"),
        (1, ENGINE, "KeyError: 1", f"has ended: {ENGINE}"),
        (128 + signal.SIGABRT, ENGINE, None, f"has ended: {ENGINE}"),
    ],
)
@pytest.mark.parametrize("wrote", [False, True])
def test_the_end_of_a_ready_server_is_told_where_nobody_asked_for_it(
    log, shown, status, dead, failed, said, wrote
):
    """In the last line, with the log of its start if there is one, which stays."""
    shown.checked()
    shown.console.written(b"Traceback\n" * wrote, "err")
    shown.event("ready", **READY)
    shown.new()
    if dead:
        shown.event("dead", reason=dead)
        shown.event("dead", reason="what another server knew of it")
    if failed:
        os.write(log.pipe, json.dumps({"event": "failed", "pid": 1, "reason": failed}).encode())
        os.write(log.pipe, b"\n")
    assert shown.console.ended(status) == (wrote and said is not None)
    end = f"; the log of its start is {log.path}" if wrote else ""
    assert shown.new() == ([f"attnres-serve: the server {said}{end}."] if said else [])


def test_a_node_without_an_address_is_ready_when_it_has_loaded(shown):
    shown.checked(headless=True)
    shown.event("built", how="algorithm single_pass")
    assert not shown.console.ready
    shown.new()
    shown.event("loaded")
    assert shown.console.ready
    assert shown.new()[-1] == "Loaded after 0.0 s. Ctrl-C stops this node."


def test_a_beginning_that_takes_long_is_told_once(shown):
    """Neither what is refused at once nor another command than to serve has a line."""
    shown.console.tick()
    assert shown.new() == []
    for _ in range(3):
        shown.now += 1
        shown.console.tick()
    assert shown.new() == ["    1.0 s  check the checkpoint"]
    shown.checked()
    shown.new()
    shown.console.tick()
    assert shown.new() == []


def test_only_the_terminal_is_cleared(shown):
    shown.out.is_terminal = True
    shown.checked()
    shown.console.tick()
    shown.event("warning", text="watch out")
    assert shown.err.data == b"  warning: watch out\n"
    assert shown.out.data.endswith(b"\r\x1b[K")


@pytest.mark.parametrize(
    ("arguments", "variables", "wanted"),
    [
        (["serve"], {}, False),
        (["serve", "--max-logprobs", "5"], {"VLLM_LOGGING_COLOR": "0"}, False),
        (["serve", "--verbose"], {}, True),
        (["serve", "--log-level", "debug"], {}, True),
        (["serve", "--enable_log_requests"], {}, True),
        (["serve"], {"VLLM_LOGGING_LEVEL": "INFO"}, True),
        (["serve"], {"VLLM_LOG_STATS_INTERVAL": "5"}, True),
        (["serve"], {"VLLM_LOGGING_CONFIG_PATH": "file.json"}, True),
    ],
)
def test_who_asks_for_the_log(arguments, variables, wanted):
    assert wants_log(arguments, variables) is wanted
