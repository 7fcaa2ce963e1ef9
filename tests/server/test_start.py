"""Starts of ``serve`` that end before they are ready, and the log of one that is.

``test_reliability`` has a server that became ready.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from load import tree
from serving import DEMO, OURS, START_TIMEOUT, environment, free_port

pytestmark = pytest.mark.engine

LOG = {"VLLM_LOGGING_LEVEL": "INFO"}
QUIET: dict[str, str] = {}
KEY = "a-key-of-the-test"
EAGER = ("--enforce-eager",)
# What must not be said at an end.
NOISE = re.compile("Traceback|nanobind|leaked|resource_tracker|Error")


class Command:
    """A running ``attnres-serve serve`` of the demo, in a session of its own as in a terminal."""

    def __init__(
        self,
        folder: Path,
        flags: tuple[str, ...],
        variables: dict[str, str],
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        # Among them files of killed processes, whose numbers may be given again.
        self.before = set(os.listdir("/dev/shm"))
        self.files = folder / "out", folder / "err"
        # An engine that ran in this process has set LD_PRELOAD for the processes after it.
        gone = ("VLLM_LOGGING", "LD_PRELOAD")
        kept = {k: v for k, v in environment().items() if not k.startswith(gone)}
        words = [*OURS, str(DEMO), "--host", "127.0.0.1", "--port", str(self.port), *flags]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=err, env=kept | variables, start_new_session=True
            )

    @property
    def out(self) -> list[str]:
        return self.files[0].read_text(errors="replace").splitlines()

    @property
    def err(self) -> list[str]:
        return self.files[1].read_text(errors="replace").splitlines()

    def wait_for(self, text: str) -> None:
        """Until a line has the text; an empty one is there at once."""
        end = time.monotonic() + START_TIMEOUT
        while text and not any(text in line for line in (*self.out, *self.err)):
            assert self.process.poll() is None, self.err
            assert time.monotonic() < end, f"it never said {text!r}"
            time.sleep(0.02)

    def wait_until_it_hears(self) -> None:
        """Until SIGTERM no longer ends the interpreter before it can run anything of ours."""
        bit = 1 << (signal.SIGTERM - 1)
        status = Path(f"/proc/{self.process.pid}/status")
        end = time.monotonic() + START_TIMEOUT
        while not any(
            int(mask, 16) & bit
            for mask in re.findall(r"^Sig(?:Blk|Cgt):\s*(\w+)", status.read_text(), re.M)
        ):
            assert self.process.poll() is None, self.err
            assert time.monotonic() < end, "it never heard a signal"
            time.sleep(0.005)

    def end(self, send) -> tuple[int, float]:
        """Send a signal; returns the status and the seconds, when nothing is left of it."""
        processes = tree(self.process.pid)
        begin = time.monotonic()
        send(self.process.pid)
        status = self.process.wait(60)
        seconds = time.monotonic() - begin
        self.left_nothing(processes)
        return status, seconds

    def left_nothing(self, processes: list[psutil.Process]) -> None:
        """Wait until its processes have ended, which left no file of OpenMP's."""
        end = time.monotonic() + 60  # a busy machine takes its time
        while left := [process for process in processes if is_running(process)]:
            assert time.monotonic() < end, left
            time.sleep(0.02)
        names = [f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}" for process in processes]
        assert not {*names} & {*os.listdir("/dev/shm")} - self.before


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("VLLM::Worker")
    except psutil.NoSuchProcess:
        return False


def is_running(process: psutil.Process) -> bool:
    """Not so one that has ended and waits for init to take note of it, which takes a while."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def interrupt_group(pid: int) -> None:
    """What Ctrl-C in a terminal does."""
    os.killpg(pid, signal.SIGINT)


@contextmanager
def begun(
    folder: Path,
    *flags: str,
    port: int | None = None,
    **variables: str,
) -> Iterator[Command]:
    command = Command(folder, flags, variables, port)
    try:
        yield command
    finally:
        for process in tree(command.process.pid) if command.process.poll() is None else ():
            process.kill()
        command.process.wait()


MOMENTS = [
    ("before vLLM is imported", terminate, "", EAGER, QUIET),
    ("while vLLM is imported", interrupt_group, "layout", EAGER, QUIET),
]
# A whole start each; the others hear a signal in every way that there is, and
# ``test_supervisor`` has what ends the processes of a server.
MORE_MOMENTS = [
    ("before vLLM is imported", interrupt_group, "", EAGER, QUIET),
    ("it compiles", interrupt_group, "compile, warm up", (), QUIET),
    ("the model is built", terminate, "Starting to load model", EAGER, LOG),
    ("it compiles", terminate, "Warming up model for the compilation", (), LOG),
    ("the first request runs", terminate, "first request", EAGER, QUIET),
]


def named(moments, *marks) -> list:
    return [pytest.param(*row, id=f"{row[0]}: {row[1].__name__}", marks=marks) for row in moments]


@pytest.mark.parametrize(
    ("name", "send", "text", "flags", "variables"),
    [*named(MOMENTS), *named(MORE_MOMENTS, pytest.mark.exhaustive)],
)
def test_a_signal_ends_a_start(tmp_path, name, send, text, flags, variables):
    """And its key is nowhere to be read meanwhile."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with begun(tmp_path, "--api-key-file", str(keys), *flags, **variables) as command:
        if text:
            command.wait_for(text)
            lists = [Path(f"/proc/{command.process.pid}/{name}") for name in ("cmdline", "environ")]
            assert b"api-key-file" in lists[0].read_bytes()
            assert not [path for path in (*lists, *command.files) if KEY in path.read_text()]
        else:
            command.wait_until_it_hears()
        before = len(command.err)
        status, seconds = command.end(send)
        print(f"{name}: ended after {seconds:.1f} s")
        assert status == 130
        said = command.err[before:]
        assert said[-1] == "attnres-serve: interrupted."
        assert not NOISE.search("\n".join(said))
        if not variables:
            assert said == ["attnres-serve: interrupted."]
            assert not NOISE.search("\n".join(command.out))


@pytest.mark.exhaustive
def test_ctrl_c_stops_a_ready_server(tmp_path):
    """Whose key is nowhere to be read, after the request that its last line tells."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with begun(tmp_path, "--api-key-file", str(keys), *EAGER) as command:
        command.wait_for('"prompt": ')
        text = "\n".join(command.out)
        told = text[text.index("curl ") :].replace("YOUR_KEY", KEY)
        asked = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)
        assert json.loads(asked.stdout)["choices"]
        lists = [Path(f"/proc/{command.process.pid}/{name}") for name in ("cmdline", "environ")]
        assert not [path for path in (*lists, *command.files) if KEY in path.read_text()]
        before = len(command.err)
        status, _ = command.end(interrupt_group)
        assert status == 0
        (sentence,) = command.err[before:]
        assert sentence.startswith("attnres-serve: stopping;")


def reason_and_log(command: Command) -> tuple[str, list[str]]:
    """The last sentence of a failed start, and what stands before it; the log that it names."""
    *before, last = command.err
    begin, end = "attnres-serve: the server could not be started: ", "; its log is "
    assert last.startswith(begin)
    reason, _, path = last.removeprefix(begin).rpartition(end)
    log = Path(path.removesuffix("."))
    assert before == log.read_text(errors="replace").splitlines()
    log.unlink()
    return reason, before


@pytest.mark.exhaustive
def test_a_failed_start_says_what_the_engine_said(tmp_path):
    with begun(tmp_path, "--num-gpu-blocks-override", "1", *EAGER) as command:
        assert command.process.wait(START_TIMEOUT) == 1
        reason, log = reason_and_log(command)
        assert reason.startswith("ValueError: No available memory for the cache blocks")
        assert any("EngineCore failed to start" in line for line in log)
        assert not any(" INFO " in line for line in log)


@pytest.mark.exhaustive
def test_a_failed_start_says_which_process_was_killed(tmp_path):
    with begun(tmp_path, *EAGER) as command:
        command.wait_for("import vLLM")
        end = time.monotonic() + START_TIMEOUT
        while not (workers := [p for p in tree(command.process.pid) if is_worker(p)]):
            assert time.monotonic() < end
            time.sleep(0.1)
        workers[0].kill()
        assert command.process.wait(START_TIMEOUT) == 1
        reason, _ = reason_and_log(command)
        assert re.match(r"\S+ was ended by signal 9 .*(, and then \w+|$)", reason)
