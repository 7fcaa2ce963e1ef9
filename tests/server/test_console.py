"""What is shown of a server, and the supervisor's parts: without an engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from attnres_serve.compat import device
from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.server import launcher
from attnres_serve.server.start import address, example, preload
from attnres_serve.server.start.console import Console
from attnres_serve.server.start.levels import wants_log
from attnres_serve.start import events, failures
from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import EngineLog

URL = "http://127.0.0.1:8000"
ASK = "curl"
FACTS = {"model": "folder", "layout": "format house, family llama, 4 blocks, 17 sites"}
READY = {"url": URL, "socket": None, "ask": ASK, "problem": None}


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
def log(tmp_path, monkeypatch) -> Iterator[EngineLog]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = EngineLog("serve")
    yield log
    log.close()


def test_a_start_is_a_dozen_lines(log):
    shown = Shown(log)
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


def test_other_workers_of_the_same_model_add_nothing(log):
    shown = Shown(log)
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
def test_what_a_start_writes_is_the_log_and_nothing_else(log, data):
    shown = Shown(log)
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


def test_a_process_that_told_nothing_is_read_in_the_log(log):
    """The first exception, not the last line."""
    shown = Shown(log)
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


def test_facts_of_a_start_come_one_after_the_other(log):
    shown = Shown(log)
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
def test_every_end_of_a_start_is_told(log, status, how, words):
    shown = Shown(log)
    shown.checked()
    shown.console.written(words, "err")
    assert shown.console.ended(status)
    said = f"{how} after it wrote: Illegal instruction" if words else how
    assert shown.err.new()[-1].endswith(f": it {said}; its log is {log.path}.")


def test_an_end_before_the_checks_is_told_too(log):
    shown = Shown(log)
    assert not shown.console.ended(128 + signal.SIGILL)
    assert shown.new() == [
        "attnres-serve: the server could not be started: it was ended by signal 4 (SIGILL)."
    ]
    for status in (0, 2):  # --version, and a parser's own words
        assert not shown.console.ended(status)
    assert shown.new() == []


def test_a_refusal_stands_alone(log):
    shown = Shown(log)
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
    log, status, dead, failed, said, wrote
):
    """In the last line, with the log of its start if there is one, which stays."""
    shown = Shown(log)
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


def test_a_node_without_an_address_is_ready_when_it_has_loaded(log):
    shown = Shown(log)
    shown.checked(headless=True)
    shown.event("built", how="algorithm single_pass")
    assert not shown.console.ready
    shown.new()
    shown.event("loaded")
    assert shown.console.ready
    assert shown.new()[-1] == "Loaded after 0.0 s. Ctrl-C stops this node."


def test_a_beginning_that_takes_long_is_told_once(log):
    """Neither what is refused at once nor another command than to serve has a line."""
    shown = Shown(log)
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


def test_only_the_terminal_is_cleared(log):
    shown = Shown(log)
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


# --- streams

SUPERVISED = """
import os, sys, time
from attnres_serve.start import events
from attnres_serve.server.start import supervisor

def run():
    exec(sys.argv[1])
    return 0

sys.exit(supervisor.supervise(["serve"], run))
"""

CHECKED = "events.tell('checked', title='t', log=0, headless=0, socket=None); "


def supervised(script: str) -> list[str]:
    """A command that supervises a script in the place of a server."""
    return [sys.executable, "-c", SUPERVISED, script]


def test_a_character_that_a_stream_lacks_silences_nothing():
    """What the server writes is passed on; a sentence of ours is written as the stream can."""
    done = subprocess.run(
        supervised(
            "os.write(1, 'caf\u00e9\\nnext\\n'.encode())\n"
            "events.tell('refused', reason='caf\u00e9')"
        ),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == "caf\u00e9\nnext\n".encode()
    assert done.stderr == b"attnres-serve: caf\\xe9\n"


WRITES = f"""
def write(word):
    for n in range(9):
        os.write(n % 2 + 1, b"%s %d\\r\\n" % (word, n))

events.tell("checked", title="t", log=False, headless=False, socket=None)
write(b"start")
try:
    events.tell("ready", **{READY})  # the signal may follow at once
    time.sleep(60)
except KeyboardInterrupt:
    write(b"ready")
"""


@pytest.mark.parametrize("is_one", [False, True])
def test_streams_keep_their_order(is_one):
    """Where both are one file too, and in what is written before and behind the address."""
    stderr = subprocess.STDOUT if is_one else subprocess.PIPE
    process = subprocess.Popen(supervised(WRITES), stdout=subprocess.PIPE, stderr=stderr)
    try:
        before = [process.stdout.readline() for _ in range(8)]
        assert before[-1] == b"curl\n" and not any(b"\r" in line for line in before)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    shown = {out: range(9)} if is_one else {out: range(0, 9, 2), err: range(1, 9, 2)}
    for said, numbers in shown.items():
        lines = [line for line in said.splitlines(True) if not line.startswith(b"attnres-serve: ")]
        assert lines == [b"ready %d\r\n" % number for number in numbers]


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("pass", 1),  # it never said that it was ready
        ("sys.exit(1)", 1),
        ("events.tell('refused', reason='no'); sys.exit(2)", 0),
        (f"events.tell('ready', **{READY}); os.kill(os.getpid(), 6)", 0),
        (f"events.tell('ready', **{READY})", 0),
    ],
)
def test_a_file_stays_only_behind_a_failed_start(tmp_path, script, left):
    script = CHECKED + script
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run(supervised(script), env=variables, capture_output=True, check=False)
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"] * left


@pytest.mark.parametrize(
    ("script", "refusal", "reason"),
    [
        ("events.tell('refused', reason='No.'); sys.exit(2)", "No.", None),
        ("events.tell('failed', reason='no room'); sys.exit(1)", None, "no room"),
        (CHECKED + "events.tell('failed', reason='no room'); sys.exit(1)", None, "no room{log}"),
        (CHECKED + "os.kill(os.getpid(), 9)", None, f"it {how_it_ended(-9)}{{log}}"),
        (CHECKED + f"events.tell('ready', **{READY})", None, None),
        (
            CHECKED + f"events.tell('ready', **{READY}); events.tell('dead', reason='gone'); "
            "sys.exit(1)",
            None,
            "the server has ended: gone",
        ),
        ("sys.exit(2)", None, None),  # it shows something else than a server
    ],
)
def test_whoever_began_the_supervisor_is_told_why(tmp_path, script, refusal, reason):
    with closing(EngineLog("outer")) as log:
        variables = os.environ | log.variables | {"TMPDIR": str(tmp_path)}
        subprocess.run(supervised(script), env=variables, capture_output=True, check=False)
        said = "".join(f"; its log is {path}" for path in tmp_path.glob("*.log"))
        assert log.reason == (reason and reason.format(log=said))
        assert log.refusal == refusal


def test_no_folder_for_temporary_files_is_one_sentence(tmp_path):
    script = "import tempfile; tempfile.tempdir = 'nowhere'; " + SUPERVISED
    words = [sys.executable, "-c", script, "pass"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("attnres-serve: no temporary file can be made (")
    assert done.stderr.endswith("let TMPDIR name a folder for them.\n")


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_streams_may_be_closed(closed):
    words = ["bash", "-c", f'exec "$@" {closed}', "-", *supervised("print('out', flush=True)")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == ("" if "1>" in closed else "out\n")
    assert done.stderr == ""


def test_a_server_that_a_signal_killed_ends_with_the_status_of_a_shell():
    done = subprocess.run(supervised("os.kill(os.getpid(), 9)"), capture_output=True, check=False)
    assert done.returncode == 128 + 9


def test_a_reader_that_left_does_not_end_the_server():
    script = "os.write(1, b'a\\n'); os.write(2, b'b\\n')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(supervised(script), stdout=write, stderr=subprocess.PIPE, check=True)
    os.close(write)
    assert done.stderr == b"b\n"


def test_a_reader_that_stalls_holds_up_no_signal():
    script = "os.write(2, b'begun\\n'); os.write(1, b'line\\n' * 100_000); time.sleep(60)"
    process = subprocess.Popen(supervised(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr.readline() == b"begun\n"
        time.sleep(0.5)  # for the pipe to be full
        process.terminate()
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()


LEAVES = f"""
import signal, subprocess
engine = subprocess.Popen(["sleep", "60"])
left = "/dev/shm/__KMP_REGISTERED_LIB_%d_%d" % (engine.pid, os.getuid())
open(left, "w").close()
os.symlink(left, sys.argv[2])
signal.signal(signal.SIGUSR1, signal.default_int_handler)
try:
    events.tell("ready", **{READY})  # the signal may follow at once
    time.sleep(60)
except KeyboardInterrupt:
    engine.kill()
    engine.wait()
"""


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_a_killed_engine_leaves_is_removed(is_stopped, tmp_path):
    """The server ends after it, stopped or not, so it is no longer of the session at the end."""
    left = tmp_path / "left"
    process = subprocess.Popen([*supervised(LEAVES), left], stdout=subprocess.PIPE)
    try:
        while b"metrics" not in process.stdout.readline():
            pass
        assert left.exists()
        if is_stopped:
            process.send_signal(signal.SIGINT)
        else:
            (server,) = psutil.Process(process.pid).children()
            server.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0
        assert left.is_symlink() and not left.exists()
    finally:
        process.kill()
        process.communicate()


# --- events


@pytest.mark.parametrize("is_given", [False, True])
def test_what_a_file_of_flags_says_is_told(tmp_path, monkeypatch, log, is_given):
    value = str(is_given).lower()
    config = tmp_path / "flags.yaml"
    config.write_text(f"enable-log-requests: {value}\nheadless: {value}\nport: 0\n")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_PLUGINS", "attnres")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    monkeypatch.setattr(launcher, "check_checkpoint", lambda name, words: (name, None, "bfloat16"))
    monkeypatch.setattr(launcher.openai_server, "run_server", lambda *_: None)
    with log.heard():
        launcher.serve(of_server(["--config", str(config)]))
    (event,) = [event for event in log.events() if event["event"] == "checked"]
    assert (event["log"], event["headless"], event["socket"]) == (is_given, is_given, None)
    assert os.environ.get("VLLM_LOGGING_LEVEL") == (None if is_given else "WARNING")


# --- the request to paste


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize(
    ("url", "socket_path", "model", "takes_text"),
    [
        (URL, None, "demo", True),
        ("https://[::1]:9000/a b", None, 'it\'s a "model" $HOME', True),
        ("http://localhost", "/run/a socket", "ünï/代码", False),
    ],
)
def test_the_request_can_be_pasted(url, socket_path, model, takes_text, has_key, tmp_path):
    """A shell hands curl what was meant; curl here tells its words."""
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "curl").chmod(0o755)
    said = example.request(url, socket_path, model, has_key, takes_text)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["sh", "-c", said], env=variables, capture_output=True, check=True)
    words = told.stdout.decode().split("\0")[:-1]
    assert f"{url}/v1/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["max_tokens"]) == (model, 40)
    assert isinstance(body["prompt"], str) == takes_text
    assert ("Authorization: Bearer YOUR_KEY" in words) == has_key
    place = ["--unix-socket", socket_path] if socket_path else []
    assert [word for word in words if word in ("--unix-socket", socket_path)] == place


@pytest.mark.parametrize(
    ("checkpoint", "model", "words", "names"),
    [
        (None, "/src/demo/checkpoint", [], ["demo", "/src/demo/checkpoint"]),
        ("/m/mine", "/m/mine", [], ["mine", "/m/mine"]),
        ("/m/mine/", "/m/mine", ["--port=1"], ["mine", "/m/mine/", "/m/mine"]),
        ("/", "/", [], ["/"]),
        ("org/model", "org/model", [], ["org/model"]),
        ("/m/mine", "/m/mine", ["--lora-modules", "mine=/a", "b=/b"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ["--lora-modules=mine=/a"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ["--lora-modules", '{"name": "mine", "path": "/a"}'], ["/m/mine"]),
    ],
)
def test_a_model_has_the_name_of_its_folder(checkpoint, model, words, names):
    """And that of its path; an adapter keeps the name that it was given."""
    assert launcher.names(checkpoint, model, of_server(words)) == names


# --- the address


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_socket_that_a_server_left_is_removed(sockets, monkeypatch, is_relative):
    monkeypatch.chdir(sockets)
    path = "s" if is_relative else str(sockets / "s")
    address.clear_socket(path)  # there is none yet
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
        assert os.path.exists(path)  # as after a stop, and after kill -9
        address.clear_socket(path)
        assert not os.path.exists(path)


HAS_SOCKET = """
import signal, socket
from attnres_serve.start import events
path = sys.argv[2]
events.tell("checked", title="", log=False, headless=False, socket=path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
"""
IS_READY = """
server.listen()
events.tell("ready", url="http://localhost", socket=path, ask="", problem=None)
"""


@pytest.mark.parametrize(
    ("goes_on", "number", "status"),
    [
        (
            "signal.signal(15, lambda *_: sys.exit(0))" + IS_READY + "time.sleep(60)",
            signal.SIGTERM,
            0,
        ),
        ("signal.signal(2, signal.SIG_DFL)" + IS_READY + "time.sleep(60)", signal.SIGINT, 130),
        (IS_READY + "os.kill(os.getpid(), 9)", None, 128 + 9),
        ("events.tell('warning', text='begun'); time.sleep(60)", signal.SIGTERM, 130),
        ("sys.exit('no such engine')", None, 1),
    ],
    ids=["stopped", "cut off", "killed", "interrupted in its start", "not started"],
)
def test_no_server_that_ends_leaves_its_socket(sockets, goes_on, number, status):
    words = [*supervised(HAS_SOCKET + goes_on), "s"]
    process = subprocess.Popen(words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, cwd=sockets)
    try:
        while number and not re.search(b"metrics|begun", process.stdout.readline()):
            assert process.poll() is None
        if number:
            process.send_signal(number)
        assert process.wait(60) == status
        assert not (sockets / "s").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_socket_in_use_stays(sockets, monkeypatch, listens, is_relative):
    """Also that of a server that starts, which holds it and does not listen yet."""
    monkeypatch.chdir(sockets)
    path = "s" if is_relative else str(sockets / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        if listens:
            server.listen()
        with pytest.raises(SettingError, match=r"s is in use by another server; stop that one, or"):
            address.clear_socket(path)
        assert os.path.exists(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is a file and no socket; choose another path with --uds."),
        ("folder", "is a folder and no socket; choose another path with --uds."),
        ("link", "is a file and no socket"),
        (
            "nowhere/s",
            r"^no socket can be made at .*nowhere/s \(No such file or directory\); choose",
        ),
        ("file/s", r"\(Not a directory\); choose another path"),
        ("ä" * 60, r"\(AF_UNIX path too long\); choose another path with --uds."),
    ],
)
def test_a_path_where_no_socket_can_be(sockets, name, said):
    (sockets / "file").write_text("kept")
    (sockets / "folder").mkdir()
    (sockets / "link").symlink_to("file")
    with pytest.raises(SettingError, match=said):
        address.clear_socket(str(sockets / name))
    assert (sockets / "file").read_text() == "kept"
    assert {path.name for path in sockets.iterdir()} == {"file", "folder", "link"}


# --- preloading


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What the command begins again with, on a machine with both libraries."""
    found = []
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / preload.OPENMP).touch()
    (tmp_path / preload.ALLOCATORS[1]).touch()
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(preload, "FOLDERS", (tmp_path / "nowhere", tmp_path))
    monkeypatch.setattr(preload.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    monkeypatch.setattr(os, "execve", lambda *arguments: found.append(arguments))
    return found


def test_libraries_are_preloaded(begun, tmp_path):
    preload.begin_again_with_libraries()
    ((program, words, variables),) = begun
    assert words == [program, *sys.orig_argv[1:]] and program == sys.executable
    assert variables["LD_PRELOAD"].split(":") == [
        str(tmp_path / preload.ALLOCATORS[1]),
        str(tmp_path / "lib" / preload.OPENMP),
    ]


@pytest.mark.parametrize("given", ["", "/some/library.so"])
def test_a_given_preload_is_kept(begun, monkeypatch, given):
    monkeypatch.setenv("LD_PRELOAD", given)  # which is also how it does not begin a third time
    preload.begin_again_with_libraries()
    assert not begun


def test_it_begins_again_once_where_the_variable_is_dropped(begun, monkeypatch):
    """As the loader drops it in an interpreter with more rights than its user."""
    preload.begin_again_with_libraries()
    monkeypatch.setenv(preload.BEGUN, begun[0][2][preload.BEGUN])
    preload.begin_again_with_libraries()
    assert len(begun) == 1
    assert preload.BEGUN not in os.environ  # of what the server starts


def test_nothing_is_preloaded_where_there_is_nothing(begun, monkeypatch, tmp_path):
    monkeypatch.setattr(preload.sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(preload, "FOLDERS", ())
    preload.begin_again_with_libraries()
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    monkeypatch.setattr(preload, "libraries", lambda: [Path("found.so")])
    preload.begin_again_with_libraries()
    assert not begun
