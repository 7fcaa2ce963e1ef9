"""What is shown of a server's lines, and the supervisor's parts: without an engine."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from serving import OURS, environment
from starlette.testclient import TestClient

from attnres_serve import cli
from attnres_serve.compat import prepare, source, start_events
from attnres_serve.compat.workarounds import quick_exit
from attnres_serve.errors import SettingError
from attnres_serve.server import launcher
from attnres_serve.server.lifecycle import Lifecycle
from attnres_serve.server.routes import page
from attnres_serve.server.start import address, example, preload, supervisor
from attnres_serve.server.start.console import WARNINGS, Console, wants_log

URL = "http://127.0.0.1:8000"
ASK = "curl"
FACTS = {"model": "folder", "layout": "format house, family llama, 4 blocks, 17 sites"}
ENGINE = "(EngineCore pid=7)"


class Shown:
    """A console, its streams and a clock that stands still."""

    def __init__(self, verbose: bool = False) -> None:
        self.out, self.err, self.now = io.StringIO(), io.StringIO(), 0.0
        self.console = Console(self.out, self.err, verbose, lambda: self.now)

    def event(self, name: str, **facts) -> None:
        self.console.event({"event": name, **facts})

    def checked(self, log: bool = False, headless: bool = False) -> None:
        self.event("model", facts=FACTS)
        title = "attnres-serve 1, vLLM 2 on CPU"
        self.event("checked", title=title, log=log, headless=headless, socket=None)

    def start(self, problem: str | None = None) -> None:
        self.checked()
        for name, more in (
            ("imported", {}),
            ("built", {"how": "algorithm single_pass, backend cpp"}),
            ("loaded", {}),
            ("warm", {}),
            ("ready", {"url": URL, "socket": None, "ask": ASK, "problem": problem}),
        ):
            self.now += 2
            self.event(name, **more)

    def log(self, level: str, text: str) -> None:
        self.console.line(f"{ENGINE} {level} 11-24 08:50:47 [core.py:133] {text}", "out")

    def new(self) -> list[str]:
        """Lines since the last time, of both streams."""
        said = [*self.out.getvalue().splitlines(), *self.err.getvalue().splitlines()]
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return said


def test_a_start_is_a_dozen_lines():
    shown = Shown()
    shown.start()
    said = shown.new()
    assert len(said) == 14
    assert said[1:3] == ["  model     folder", f"  layout    {FACTS['layout']}"]
    assert "  computed  algorithm single_pass, backend cpp" in said
    assert [line.split()[-2:] for line in said if line.endswith(" s")] == [["2.0", "s"]] * 5
    assert "10.0 s" in said[9]
    assert said[-1] == ASK
    assert [line.split()[1] for line in said[-4:-1]] == [
        f"{URL}/v1",
        f"{URL}/attn_res",
        f"{URL}/metrics",
    ]


def test_other_workers_of_the_same_model_add_nothing():
    shown = Shown()
    shown.checked()
    for _ in range(2):
        for name in ("imported", "built", "loaded"):
            shown.event(name, how="as it is") if name == "built" else shown.event(name)
    assert len([line for line in shown.new() if line.endswith(" s")]) == 3


def test_logs_of_a_start_are_hidden_and_warnings_are_few():
    shown = Shown()
    shown.checked()
    shown.new()
    for number in range(20):
        shown.log("INFO", f"of no matter {number}")
        shown.log("WARNING", f"watch out {number}")
        shown.console.line("Loading safetensors checkpoint shards:   0%", "err", "\r")
    shown.log("WARNING", "watch out 0")
    shown.log("WARNING", "Triton is not installed. triton-cpu is expected on x86 CPUs.")
    shown.log("WARNING", "AttnRes: there is no API key")
    said = shown.new()
    assert said == [
        *(f"  warning: watch out {number}" for number in range(WARNINGS)),
        "  warning: AttnRes: there is no API key",
    ]
    shown.event("ready", url=URL, socket="run/s", ask=ASK, problem=None)
    assert shown.out.getvalue().endswith(f"  socket    run/s\n{ASK}\n")
    assert f"  {20 - WARNINGS} more warnings: --verbose shows them." in shown.new()


def test_what_every_container_warns_of_is_hidden():
    shown = Shown()
    shown.checked()
    shown.new()
    for text in (
        "W1124 08:50:47.123000 76 torch/_library/triton.py:53] Triton not available, x = []",
        "[W1124 08:50:47.123456789 utils.cpp:76] Warning: numa_migrate_pages failed. errno: 1 (f)",
    ):
        shown.console.line(f"{ENGINE} {text}", "err")
    assert shown.new() == []
    failed = "numa_migrate_pages failed. errno: 12 (f)"  # there is no memory left
    shown.console.line(f"[W1124 08:50:47.123456789 utils.cpp:76] Warning: {failed}", "err")
    assert shown.new() == [f"  warning: Warning: {failed}"]


def test_casts_of_weights_are_quiet():
    """`check` says in which type a checkpoint is stored and in which it is served."""
    shown = Shown()
    shown.checked()
    shown.new()
    cast = "Attempted to load weight {} with dtype {} into parameter with dtype {}"
    for name, stored, served in (
        ("model.norm.weight", "float32", "bfloat16"),
        ("lm_head.weight", "torch.float32", "torch.float16"),
        ("model.layers.0.mlp.gate_proj.weight", "bfloat16", "float32"),
    ):
        shown.log("WARNING", cast.format(name, stored, served))
    shown.log("WARNING", "The chat template requires system-first ordering, so inline system")
    shown.log("WARNING", "Default vLLM sampling parameters have been overridden by the model's")
    assert shown.new() == []
    shown.log("WARNING", unread := "Attempted to load weight a with dtype uint8 into a parameter")
    assert shown.new() == [f"  warning: {unread}"]


def test_a_server_that_is_not_ready_says_why():
    shown = Shown()
    shown.start("The request that warms up failed.")
    assert "  not ready: The request that warms up failed." in shown.new()


def test_what_a_ready_server_shows():
    shown = Shown()
    shown.start()
    shown.new()
    request = 'INFO:     127.0.0.1:5 - "{} HTTP/1.1" {}'
    kept = [
        request.format("POST /v1/completions", "200 OK"),
        request.format("GET /health", "503 Service Unavailable"),
        'INFO:     2026-11-24T08:50:47+0000 127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK '
        "0.532s in=12 out=40 tok/s=75.2 id=order-7",
        f"{ENGINE} WARNING 11-24 08:50:47 [core.py:133] watch out",
        f"{ENGINE} ERROR 11-24 08:50:47 [core.py:133] it broke",
        "ERROR:    Exception in ASGI application",
        "ValueError: as libraries write it",
    ]
    hidden = [
        f"{ENGINE} INFO 11-24 08:50:47 [core.py:133] Avg prompt throughput",
        "INFO:     Application startup complete.",
        "",
    ]
    for line in (*kept, *hidden):
        shown.console.line(line, "out")
    assert shown.new() == kept


def test_a_stop_shows_nothing_unless_it_fails():
    shown = Shown()
    shown.start()
    shown.new()
    shown.console.stopping = True
    shown.event("drained")
    shown.log("ERROR", "EngineDeadError")
    shown.console.line("terminate called without an active exception", "err")
    for line in ("INFO:     Shutting down", "nanobind: leaked 4 instances!", " - leaked type"):
        shown.console.line(line, "err")
    assert shown.new() == []
    shown.console.ended(0)
    assert shown.new() == []
    kept = [
        f"{ENGINE} ERROR 11-24 08:50:47 [core.py:133] EngineDeadError",
        "terminate called without an active exception",
    ]
    shown.console.ended(1)
    assert shown.new() == kept
    shown.console.ended(128 + signal.SIGABRT)
    assert shown.new() == [*kept, "attnres-serve: the server was killed by signal 6."]


def test_a_drain_shows_requests_and_errors():
    shown = Shown()
    shown.start()
    shown.new()
    shown.console.stopping = True
    answered = 'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'
    shown.console.line(answered, "out")
    shown.console.line("ERROR:    Exception in ASGI application", "out")
    shown.event("drained")
    shown.console.line(answered, "out")  # the log may be late
    shown.console.ended(0)
    assert shown.new() == [answered, "ERROR:    Exception in ASGI application", answered]


def test_the_reason_of_a_failed_start_is_its_first_exception():
    shown = Shown()
    shown.checked()
    shown.new()
    shown.log("INFO", "of no matter")
    for text in ("EngineCore failed to start.", "Traceback", "    ^^^^", "ValueError: no memory"):
        shown.log("ERROR", text)
    for text in ("Traceback (most recent call last):", '  File "core.py"'):
        shown.console.line(f"(APIServer pid=6) {text}", "err")
    text = "RuntimeError: Engine core initialization failed. See root cause above."
    shown.console.line(f"(APIServer pid=6) {text}", "err")
    shown.console.ended(1)
    said = shown.new()
    assert said[:-1] == [
        "  EngineCore failed to start.",
        "  Traceback",
        "  ValueError: no memory",
    ]
    assert said[-1].startswith("attnres-serve: ") and said[-1].endswith("ValueError: no memory")


def test_a_killed_start_shows_its_last_lines():
    shown = Shown()
    shown.checked()
    shown.new()
    shown.console.line("Illegal instruction", "err")
    shown.console.ended(128 + signal.SIGILL)
    assert shown.new() == [
        "  Illegal instruction",
        "attnres-serve: the server could not be started (--verbose shows the whole log): "
        "it was killed by signal 4.",
    ]


@pytest.mark.parametrize(
    "exception",
    [
        "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "torch._dynamo.exc.Unsupported",
    ],
)
def test_the_reason_is_an_exception_of_any_name(exception):
    shown = Shown()
    shown.checked()
    for text in ("Traceback (most recent call last):", "  File 'a'", exception, "Set a flag: it"):
        shown.log("ERROR", text)
    pointer = "Exception: WorkerProc initialization failed. See stack trace for root cause."
    for text in ("Traceback (most recent call last):", "  File 'b'", pointer):
        shown.log("ERROR", text)
    shown.console.ended(1)
    assert shown.new()[-1].endswith(f": {exception}")


def test_an_error_hides_no_native_abort():
    shown = Shown()
    shown.checked()
    shown.new()
    shown.log("ERROR", "of no matter")
    what = "  what():  no room"
    for text in ("terminate called after throwing an instance of 'c10::Error'", what):
        shown.console.line(f"{ENGINE} {text}", "err")
    shown.console.ended(128 + signal.SIGABRT)
    said = shown.new()
    assert said[0] == "  of no matter" and f"  {what}" in said
    assert said[-1].endswith(f": {what.strip()}")


@pytest.mark.parametrize("verbose", [False, True])
def test_an_error_that_names_a_library_is_no_last_word(verbose):
    shown = Shown(verbose)
    shown.checked()
    error = "ImportError: nanobind ABI of xgrammar differs; see resource_tracker"
    shown.console.line(error, "err")
    shown.console.line("nanobind: leaked 4 instances!", "err")
    shown.console.ended(1)
    said = shown.new()
    assert said[-1].endswith(f": {error}")
    assert ("nanobind: leaked 4 instances!" in " ".join(said)) is verbose


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (0, "ended with status 0"),
        (143, "was killed by signal 15"),
        (132, "was killed by signal 4"),
        (1, "ended with status 1"),
    ],
)
def test_every_end_of_a_start_is_told(status, how):
    shown = Shown()
    shown.console.line("attnres-serve: whoever can list processes reads the key", "err")
    shown.checked()
    shown.console.ended(status)
    assert shown.new()[-1].endswith(f": it {how}.")


def test_an_end_before_the_checks_is_told_too():
    shown = Shown()
    shown.console.line("attnres-serve: whoever can list processes reads the key", "err")
    shown.new()
    shown.console.ended(128 + signal.SIGILL)
    assert shown.new() == [
        "attnres-serve: the server could not be started: it was killed by signal 4."
    ]
    shown.console.ended(0)  # --version
    assert shown.new() == []


def test_warnings_that_no_logger_wrote_are_shown():
    shown = Shown()
    shown.checked()
    shown.new()
    for line in (
        "/usr/lib/site-packages/torch/a.py:12: UserWarning: this is slow",
        "  warnings.warn(",
        "[W1124 10:34:33.176139620 utils.cpp:68] few threads",
        "[rank0]:W1124 10:34:33.176000 77 torch/_dynamo/a.py:1139] recompiled",
        "[W1124 10:34:33.176139620 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy",
        "/usr/lib/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: it",
        "Loading weights",
    ):
        shown.console.line(f"{ENGINE} {line}", "err")
    told = ("this is slow", "few threads", "recompiled")
    assert shown.new() == [f"  warning: {text}" for text in told]


def test_a_node_without_an_address_is_ready_when_it_has_loaded():
    shown = Shown()
    shown.checked(headless=True)
    shown.event("built", how="algorithm single_pass")
    assert not shown.console.ready
    shown.new()
    shown.event("loaded")
    assert shown.console.ready
    assert shown.new()[-1] == "Loaded after 0.0 s. Ctrl-C stops this node."


def test_a_file_of_flags_may_ask_for_the_log():
    shown = Shown()
    shown.checked(log=True)
    shown.log("INFO", "whole")
    assert shown.new() == [f"{ENGINE} INFO 11-24 08:50:47 [core.py:133] whole"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_terminal_is_cleared():
    shown = Shown()
    shown.out = Terminal()
    shown.console = Console(shown.out, shown.err, False, lambda: shown.now)
    shown.checked()
    shown.console.tick()
    shown.log("WARNING", "watch out")
    assert shown.err.getvalue() == "  warning: watch out\n"
    assert shown.out.getvalue().endswith("\r\x1b[K")


def test_the_end_of_a_worker_is_the_reason_of_what_follows():
    shown = Shown()
    shown.checked()
    died = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
    for text in (died, "EngineCore failed to start.", "RuntimeError: cancelled"):
        shown.log("ERROR", text)
    shown.console.ended(1)
    assert shown.new()[-1].endswith(f": {died}")


def test_a_refusal_stands_alone():
    shown = Shown()
    shown.checked()
    shown.new()
    shown.log("ERROR", "of no matter")
    shown.console.line("attnres-serve: found --grpc; leave it out.", "err")
    shown.console.ended(2)
    assert shown.new() == ["attnres-serve: found --grpc; leave it out."]


def test_verbose_shows_every_line_but_last_words():
    shown = Shown(verbose=True)
    shown.start()
    assert shown.new() == []
    shown.log("INFO", "whole")
    shown.console.line("Loading", "err", "\r")
    assert shown.out.getvalue() == f"{ENGINE} INFO 11-24 08:50:47 [core.py:133] whole\n"
    assert shown.err.getvalue() == "Loading\r"
    shown.new()
    shown.console.stopping = True
    shown.console.line("See https://nanobind.readthedocs.io/en/latest/refleaks.html", "err")
    assert shown.new() == []


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
        (["serve"], {"VLLM_LOG_BATCHSIZE_INTERVAL": "5"}, True),
        (["serve"], {"VLLM_LOGGING_CONFIG_PATH": "file.json"}, True),
    ],
)
def test_who_asks_for_the_log(arguments, variables, wanted):
    assert wants_log(arguments, variables) is wanted


# --- streams

SUPERVISED = """
import os, sys, time
from attnres_serve.server.start import supervisor

def run():
    exec(sys.argv[1])
    return 0

sys.exit(supervisor.supervise(["serve"], run))
"""


def supervised(script: str) -> list[str]:
    """A command that supervises a script in the place of a server."""
    return [sys.executable, "-c", SUPERVISED, script]


def test_a_character_that_stdout_lacks_silences_nothing():
    done = subprocess.run(
        supervised("os.write(1, 'caf\u00e9\\nnext\\n'.encode())"),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "caf\\xe9\nnext\n"


@pytest.mark.parametrize("closed", ["0<&- 1>&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
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
    script = (
        "os.write(2, b'attnres-serve: begun'); os.write(1, b'line\\n' * 100_000); time.sleep(60)"
    )
    script = f"os.write(2, b'attnres-serve: begun\\n'); {script}"
    process = subprocess.Popen(supervised(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr.readline() == b"begun\n"
        time.sleep(0.5)  # for the pipe to be full
        process.terminate()
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()


LEAVES = """
import signal, subprocess
from attnres_serve.compat import start_events
engine = subprocess.Popen(["sleep", "60"])
left = f"/dev/shm/__KMP_REGISTERED_LIB_{engine.pid}_{os.getuid()}"
open(left, "w").close()
os.symlink(left, sys.argv[2])
start_events.tell("ready", url="http://127.0.0.1", socket=None, ask="", problem=None)
try:
    time.sleep(60)
except KeyboardInterrupt:
    engine.kill()
    engine.wait()
"""


def test_what_a_killed_engine_leaves_is_removed(tmp_path):
    """The server itself killed it in its stop, so it is no longer of the session at the end."""
    left = tmp_path / "left"
    process = subprocess.Popen([*supervised(LEAVES), left], stdout=subprocess.PIPE)
    try:
        while b"metrics" not in process.stdout.readline():
            pass
        assert left.exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert left.is_symlink() and not left.exists()
    finally:
        process.kill()
        process.communicate()


# --- events


def test_events_are_told_where_somebody_listens(monkeypatch, capfd):
    monkeypatch.delenv(start_events.VARIABLE, raising=False)
    start_events.tell("built")
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(start_events.VARIABLE, "1")
    start_events.tell("built", how="cpp")
    told = capfd.readouterr().err
    assert start_events.read(f"half a line{told.rstrip()}") == (
        "half a line",
        {"event": "built", "how": "cpp"},
    )


@pytest.mark.parametrize("line", ["a line", f"{start_events.MARK}{{", f"{start_events.MARK}[]"])
def test_other_lines_are_no_events(line):
    assert start_events.read(line)[1] is None


def test_the_end_of_a_drain_is_told(monkeypatch, capfd):
    monkeypatch.setenv(start_events.VARIABLE, "1")
    lifecycle = Lifecycle()
    lifecycle.stopping, lifecycle.running = True, 1
    lifecycle._client = SimpleNamespace(errored=False)
    threading.Timer(0.3, lambda: setattr(lifecycle, "running", 0)).start()
    begin = time.monotonic()
    lifecycle.drain(10)
    assert time.monotonic() - begin > 0.2
    assert start_events.read(capfd.readouterr().err.strip("\n"))[1] == {"event": "drained"}


@pytest.mark.parametrize("is_given", [False, True])
def test_what_a_file_of_flags_says_is_told(tmp_path, monkeypatch, capfd, is_given):
    value = str(is_given).lower()
    config = tmp_path / "flags.yaml"
    config.write_text(f"enable-log-requests: {value}\nheadless: {value}\nport: 0\n")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_PLUGINS", "attnres")
    monkeypatch.setenv(start_events.VARIABLE, "1")
    monkeypatch.setattr(launcher, "check_checkpoint", lambda name, words: (name, None))
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher.openai_server, "run_server", lambda *_: None)
    own = cli.build_parser().parse_args(["serve"])
    launcher.serve("folder", own, ["--config", str(config)])
    told = [start_events.read(line)[1] for line in capfd.readouterr().err.split("\n")]
    (event,) = [event for event in told if event and event["event"] == "checked"]
    assert (event["log"], event["headless"], event["socket"]) == (is_given, is_given, None)


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


def test_the_request_fits_a_terminal():
    said = example.request(URL, None, "demo", True, True)
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.parametrize(
    ("checkpoint", "model", "words", "names"),
    [
        (None, "/src/demo/checkpoint", [], ["demo", "/src/demo/checkpoint"]),
        ("/m/mine", "/m/mine", [], ["mine", "/m/mine"]),
        ("/m/mine/", "/m/mine", ["--port=1"], ["mine", "/m/mine/", "/m/mine"]),
        ("./mine", "mine", [], ["mine", "./mine"]),
        ("/", "/", [], ["/"]),
        ("org/model", "org/model", [], ["org/model"]),
        ("/m/mine", "/m/mine", ["--lora-modules", "mine=/a", "b=/b"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ["--lora-modules=mine=/a"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ['{"name": "mine", "path": "/a"}'], ["/m/mine"]),
    ],
)
def test_a_model_has_the_name_of_its_folder(checkpoint, model, words, names):
    """And that of its path; an adapter keeps the name that it was given."""
    assert launcher.names(checkpoint, model, words) == names


@pytest.mark.parametrize("path", [".", "..", "down/.."])
def test_the_name_of_a_relative_path(path, monkeypatch, tmp_path):
    (tmp_path / "model" / "down").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model" / ("down" if path == ".." else ""))
    assert launcher.names(path, path, []) == ["model", path]


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
from attnres_serve.compat import start_events
path = sys.argv[2]
start_events.tell("checked", title="", log=False, headless=False, socket=path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
"""
IS_READY = """
server.listen()
start_events.tell("ready", url="http://localhost", socket=path, ask="", problem=None)
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
        ("os.write(2, b'attnres-serve: begun\\n'); time.sleep(60)", signal.SIGTERM, 130),
        ("sys.exit('no such engine')", None, 1),
    ],
    ids=["stopped", "cut off", "killed", "interrupted in its start", "not started"],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_no_server_that_ends_leaves_its_socket(sockets, goes_on, number, status, is_relative):
    path = "s" if is_relative else str(sockets / "s")
    words = [*supervised(HAS_SOCKET + goes_on), path]
    process = subprocess.Popen(words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, cwd=sockets)
    try:
        while number and not re.search(b"metrics|begun", process.stdout.readline()):
            assert process.poll() is None
        if number:
            process.send_signal(number)
        assert process.wait(20) == status
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
        ("ä" * 60, "bytes long; a socket's path has at most 107, so choose another path"),
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


# --- line ends


@pytest.mark.parametrize("cut", range(1, 12))
def test_records_of_several_lines_keep_their_lines(cut):
    """vLLM ends their inner lines by a carriage return and a line feed, wherever a read ends."""
    shown = Shown()
    shown.start()
    shown.new()
    keeper = supervisor._Supervisor(0, shown.console)
    head = f"{ENGINE} ERROR 11-24 08:50:47 [core.py:133] "
    lines = ["Traceback", "  File", "KeyError: x"]
    data = "".join(f"{head}{line}\r\n" for line in lines).encode() + f"{head}end\r\r\n".encode()
    step = max(len(data) * cut // 12, 1)
    for begin in range(0, len(data), step):
        keeper._take("err", data[begin : begin + step])
    keeper._take("err", b"")
    assert shown.err.getvalue() == "".join(f"{head}{line}\n" for line in [*lines, "end"])


def test_lines_that_are_written_over_stay_apart():
    shown = Shown(verbose=True)
    keeper = supervisor._Supervisor(0, shown.console)
    for data in (b"10%\r20", b"%\r", b"\nnext\n30%\r", b""):
        keeper._take("out", data)
    assert shown.out.getvalue() == "10%\r20%\nnext\n30%\r"


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
    monkeypatch.setattr(source, "is_cpu_build", lambda: True)
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


def test_a_program_that_cannot_begin_again_goes_on(begun, monkeypatch):
    def refuse(*arguments) -> None:
        begun.append(arguments)
        raise PermissionError("no")

    monkeypatch.setattr(os, "execve", refuse)
    preload.begin_again_with_libraries()
    assert begun


def test_nothing_is_preloaded_where_there_is_nothing(begun, monkeypatch, tmp_path):
    monkeypatch.setattr(preload.sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(preload, "FOLDERS", ())
    preload.begin_again_with_libraries()
    monkeypatch.setattr(source, "is_cpu_build", lambda: False)
    monkeypatch.setattr(preload, "libraries", lambda: [Path("found.so")])
    preload.begin_again_with_libraries()
    assert not begun


# --- processes


def test_a_session_is_ended_whole():
    """Also what ignores signals, and children of what has ended."""
    script = "trap '' TERM INT; (sleep 60 & sleep 60 &); sleep 60 & wait"
    leader = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    while len(supervisor._session(leader.pid)) < 4:
        time.sleep(0.02)
    supervisor.end_session(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    assert supervisor._session(leader.pid) == []


def test_a_process_may_be_called_anything(tmp_path):
    program = os.fsencode(tmp_path) + b"/caf\xc3"
    os.symlink(shutil.which("sleep"), program)
    process = subprocess.Popen([program, "60"], start_new_session=True)
    try:
        assert b"caf\xc3" in Path(f"/proc/{process.pid}/stat").read_bytes()
        supervisor.end_session(process.pid)
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()


TARGETS = """
import atexit, multiprocessing, sys, threading, time
from attnres_serve.compat.workarounds import quick_exit

class Slow:
    def __del__(self):
        time.sleep(20)

def work(seconds):
    time.sleep(seconds)
    print("worked", flush=True)

def target(how, seconds):
    quick_exit.instead_of_finalization()
    sys.kept = Slow()
    threading.Thread(target=work, args=(float(seconds),)).start()
    sys.exit(int(how))

if __name__ == "__main__":
    atexit.register(print, "bye")
    method, *arguments = sys.argv[1:]
    process = multiprocessing.get_context(method).Process(target=target, args=arguments)
    process.start()
    process.join(10)
    print(process.exitcode)
    process.kill()
"""


@pytest.mark.parametrize(
    ("method", "status", "seconds", "said"),
    [
        ("spawn", "0", "0", ["worked", "0", "bye"]),
        ("spawn", "3", "0.5", ["worked", "3", "bye"]),
        ("spawn", "0", "60", ["0", "bye"]),  # a thread that does not end
        ("fork", "0", "0.5", ["worked", "0", "bye"]),  # atexit is its parent's
    ],
)
def test_a_process_of_vllm_ends_without_finalization(tmp_path, method, status, seconds, said):
    script = tmp_path / "targets.py"
    script.write_text(TARGETS)
    words = [sys.executable, str(script), method, status, seconds]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == said, done.stderr


@pytest.mark.parametrize("is_heard", [False, True])
def test_only_processes_of_our_server_end_so(monkeypatch, is_heard):
    called = []
    monkeypatch.setattr(prepare.orphans, "is_process_of_vllm", lambda: True)
    monkeypatch.setattr(prepare.orphans, "end_with_parent", lambda: None)
    monkeypatch.setattr(prepare.torch_vector_math, "settle", lambda: None)
    monkeypatch.setattr(quick_exit, "instead_of_finalization", lambda: called.append("quick"))
    monkeypatch.setenv(start_events.VARIABLE, "1" if is_heard else "")
    prepare.process()
    assert called == ["quick"] * is_heard


def test_a_target_that_raises_ends_as_ever(monkeypatch):
    monkeypatch.setattr(quick_exit, "end_now", lambda status: pytest.fail("it raised"))
    try:
        raise KeyError("nothing")
    except KeyError:
        quick_exit._end_orderly()


def test_a_refused_start_is_one_sentence(tmp_path):
    command = [*OURS, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("attnres-serve: ") and len(done.stderr.splitlines()) == 1


# --- the way to the page


def test_the_root_leads_to_the_page():
    app = FastAPI()
    app.include_router(page.router)
    client = TestClient(app, follow_redirects=False)
    answer = client.get("/")
    assert answer.is_redirect and answer.headers["location"] == "attn_res"
    assert TestClient(app).get("/").text == TestClient(app).get("/attn_res").text
    assert "/" not in app.openapi()["paths"]
    behind = TestClient(app, root_path="/prefix", follow_redirects=True)
    assert behind.get("/prefix/").url.path == "/prefix/attn_res"
