"""A server that is started for one question: asked by its key, told of where it fails, stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from serving import DEMO, ROOT, environment, run_module

import attnres_serve
from attnres_serve import cli
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, temporary_server
from attnres_serve.server import launcher
from attnres_serve.start import events
from attnres_serve.start.ends import how_it_ended
from attnres_serve.tracing.options import TraceOptions

# Instead of the package: what `python -m attnres_serve serve CHECKPOINT` does is told by its name.
STAND_IN = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

words = sys.argv[1:]
name, folder = words[1], Path(__file__).parents[1]
given = {"words": words, "key": os.environ["VLLM_API_KEY"], "pid": os.getpid()}
given["variables"] = [name for name in os.environ if name.startswith("ATTNRES_")]
(folder / "begun").write_text(json.dumps(given))
(folder / "begun").rename(folder / "given")


def stop(*_):
    (folder / "stopped").touch()
    os._exit(0)


signal.signal(signal.SIGTERM, stop)

def tell(event, reason):
    with open(os.environ["ATTNRES_SERVE_EVENTS"], "w") as pipe:
        print(json.dumps({"event": event, "pid": os.getpid(), "reason": reason}), file=pipe)
    print("attnres-serve: other words than these.")


if name == "refuses":
    tell("refused", "nothing such is there; give another.")
    sys.exit(2)
if name == "fails":
    tell("failed", "no room; its log is /tmp/start.log")
    sys.exit(1)
if name == "is silent":
    sys.exit(3)
if name == "writes":
    print("attnres-serve: error: no such word", file=sys.stderr)
    sys.exit(2)
if name == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "tells":
    for event in ("imported", "built", "built", "loaded", "warm"):
        tell(event, "")
        time.sleep(0.5)
while name == "starts":
    time.sleep(0.1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if name == "dies":
            print("RuntimeError: gone", flush=True)
            os._exit(9)
        said = json.dumps({"error": {"message": "The trace failed."}}).encode()
        self.send_response(500)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


port = int(words[-1].partition("=")[2])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """The folder of a package that stands for ours in a child process; logs lie beside it."""
    package = tmp_path / "stand_in" / "attnres_serve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(logs))
    return package.parent


def logs_of(folder: Path) -> list[Path]:
    return [*folder.with_name("logs").iterdir()]


def given(folder: Path) -> dict:
    return json.loads((folder / "given").read_text())


def is_gone(pid: int) -> bool:
    """True once a process has ended, within half a minute."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_it_is_started_and_stopped(stand_in):
    """With our flags first, those that are given after them, and its place last."""
    with temporary_server.running("serves", ["--dtype=half", "--max-trace-tokens=9"]) as server:
        found = given(stand_in)
        assert server.key == found["key"] and len(server.key) > 30 and server.is_temporary
        words = found["words"]
    assert words[:2] == ["serve", "serves"]
    assert words.index("--dtype=half") > words.index("--enforce-eager")
    tokens = [word for word in words if word.startswith("--max-trace-tokens")]
    assert len(tokens) == 2 and tokens[-1] == "--max-trace-tokens=9"
    assert "--served-model-name=serves" in words
    assert words[-2:] == ["--host=127.0.0.1", f"--port={server.url.rpartition(':')[2]}"]
    assert (stand_in / "stopped").exists() and is_gone(found["pid"])
    assert logs_of(stand_in) == []


def test_variables_are_those_of_another_server(stand_in, monkeypatch):
    """A key of a file would replace the one that it is asked with."""
    monkeypatch.setenv("ATTNRES_API_KEY_FILE", "keys")
    with temporary_server.running("serves", []):
        assert given(stand_in)["variables"] == ["ATTNRES_SERVE_EVENTS", "ATTNRES_SERVE_RECORD"]


def test_each_phase_is_shown_as_it_begins(stand_in):
    shown: list[str] = []
    with temporary_server.running("tells", [], show=shown.append):
        begun = [line.removeprefix("starting a server: ") for line in shown]
    assert [*dict.fromkeys(begun)] == [*events.PHASES.values()]


def test_serve_knows_its_flags(stand_in, monkeypatch):
    pytest.importorskip("vllm")
    with temporary_server.running("serves", []):
        words = given(stand_in)["words"]
    asked = []
    monkeypatch.setattr(launcher, "serve", lambda *given: asked.append(given))
    assert cli.main(words) == 0 and len(asked) == 1
    assert cli.main([*words, "--no-such-flag"]) == 2 and len(asked) == 1


@pytest.mark.parametrize("flags", [["--served-model-name", "x"], ["--served-model-name=x"]])
def test_a_served_model_name(flags, stand_in):
    with temporary_server.running("serves", flags):
        assert [word for word in given(stand_in)["words"] if "=serves" in word] == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SettingError])
def test_it_is_stopped_after_any_error(error, stand_in):
    with pytest.raises(error), temporary_server.running("serves", []):
        raise error("something else")
    assert (stand_in / "stopped").exists() and is_gone(given(stand_in)["pid"])
    assert logs_of(stand_in) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("starts", signal.SIGINT), ("serves", signal.SIGINT)),
        *(("serves", signal.SIGTERM), ("starts", signal.SIGKILL)),
    ],
)
def test_it_ends_with_its_parent(name, number, stand_in, tmp_path):
    """Whether it starts or serves, and however that one ends."""
    script = f"""
import signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from attnres_serve.lens import temporary_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
with temporary_server.running({name!r}, []):
    print("serves", flush=True)
    time.sleep(600)
"""
    caller = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        while not (stand_in / "given").exists():
            assert caller.poll() is None
            time.sleep(0.05)
        if name == "serves":
            assert caller.stdout.readline() == "serves\n"
        caller.send_signal(number)
        caller.wait(60)
        assert is_gone(given(stand_in)["pid"])
    finally:
        caller.kill()
        caller.wait()
        caller.stdout.close()


def refusal(checkpoint: str, *flags: str) -> str:
    """What is said of a server that does not start."""
    with pytest.raises(SettingError) as failed, temporary_server.running(checkpoint, [*flags]):
        pytest.fail("it did not start")
    return str(failed.value)


def test_its_refusal_is_the_message(stand_in):
    assert refusal("refuses") == "nothing such is there; give another."
    assert logs_of(stand_in) == []


@pytest.mark.parametrize(
    ("name", "reason", "kept"),
    [
        ("fails", "no room; its log is /tmp/start.log.", 0),
        ("is silent", "it ended with status 3.", 1),
        ("is killed", f"it {how_it_ended(-9)}.", 1),
        ("writes", "it ended with status 2 after it wrote: attnres-serve: error: no such word.", 1),
    ],
)
def test_a_start_that_fails_has_a_reason_and_one_log(name, reason, kept, stand_in):
    """That of the start, where the server names it."""
    said, logs = refusal(name), logs_of(stand_in)
    place = "".join(f" Its log is {log}." for log in logs)
    assert said == f"the server of {name} did not start: {reason}{place}" and len(logs) == kept


def test_refusals_of_serve_are_passed_on(tmp_path, monkeypatch):
    """The command itself, through its supervisor, and not the words that it shows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert refusal(str(tmp_path / "model")).startswith(f"{tmp_path / 'model'} has no config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("serves", "The trace failed."), ("dies", "the server ended while it was asked (")],
)
def test_a_question_that_fails_has_a_log(name, said, stand_in):
    with pytest.raises(SettingError) as failed, temporary_server.running(name, []) as server:
        ask.ask(server, [3], TraceOptions.model_validate({}))
    (log,) = logs_of(stand_in)
    assert str(failed.value).startswith(said)
    assert str(failed.value).endswith(f" Its log is {log}.")


@pytest.mark.parametrize(
    "flags", ["--port 8000", "--uds=x.sock", "--api-key x", "--headless", "--api-key-file=x"]
)
def test_flags_of_another_place(flags, stand_in):
    (name,) = re.findall("--[a-z-]+", flags)
    assert refusal("serves", *flags.split()).startswith(f"{name} is for a server that")
    assert not (stand_in / "given").exists()


@pytest.mark.parametrize(
    "line", ["port: 8000", "api_key_file: x", "api-key: [x]", "headless: true"]
)
def test_flags_of_another_place_in_a_file(line, stand_in, tmp_path):
    (file := tmp_path / "serve.yaml").write_text(f"dtype: half\n{line}\n")
    said = refusal("serves", "--config", str(file))
    assert re.match(r"--[a-z-]+ is for a server that", said)
    assert not (stand_in / "given").exists()


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.versions
def test_every_door_gives_one_trace(open_server, tmp_path, monkeypatch):
    """The route of a server, the command and Python: of text, of an answer and under edits."""
    pytest.importorskip("vllm")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    edit = 'mask sites=9 sources="block 2"'
    asked = {"max_tokens": 3, "logprobs": 3, "lens": 2}
    body = {"prompt": "import os\n", **asked}
    edits = [{"sites": [9], "sources": ["block 2"], "mask": True}]
    answer = open_server.client.post("/v1/attn_res/trace", json={**body, "edits": edits})
    wanted = answer.raise_for_status().json()
    by_python = attnres_serve.trace(
        DEMO, body["prompt"], edits=edit, dtype="float32", served_model_name="demo", **asked
    )
    assert by_python.answer.model_dump(mode="json") == wanted
    out = tmp_path / "trace.json"
    words = ["--prompt", body["prompt"], "--edit", edit, "--max-tokens", "3", "--lens", "2"]
    words += ["--dtype", "float32", "--served-model-name", "demo", "--out", str(out)]
    run_module("attnres_serve", "inspect", str(DEMO), *words, timeout=300)
    assert json.loads(out.read_text()) == wanted
