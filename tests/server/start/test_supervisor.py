"""The supervisor of a process in the place of a server."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest
from supervised import CHECKED, READY, SUPERVISED, begun, supervised

from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import EngineLog


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
    with begun(supervised(WRITES), stderr=stderr) as process:
        before = [process.stdout.readline() for _ in range(8)]
        assert before[-1] == b"curl\n" and not any(b"\r" in line for line in before)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
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
    with begun(supervised(script), stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == b"begun\n"
        time.sleep(0.5)  # for the pipe to be full
        process.terminate()
        assert process.wait(10) == 130


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
    with begun([*supervised(LEAVES), left]) as process:
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
