"""The start and the stop of ``serve``, as a person and a supervisor of services see them."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from load import tree
from safetensors.torch import load_file, save_file
from serving import DEMO, OURS, START_TIMEOUT, environment, free_port

from attnres_serve.server.start import preload

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
        checkpoint: Path = DEMO,
    ) -> None:
        self.port = free_port()
        # Among them files of killed processes, whose numbers may be given again.
        self.before = set(os.listdir("/dev/shm"))
        self.files = folder / "out", folder / "err"
        # An engine that ran in this process has set LD_PRELOAD for the processes after it.
        gone = ("VLLM_LOGGING", "LD_PRELOAD")
        kept = {k: v for k, v in environment().items() if not k.startswith(gone)}
        words = [*OURS, str(checkpoint), "--host", "127.0.0.1", "--port", str(self.port), *flags]
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
        end = time.monotonic() + 60  # a busy machine takes its time
        while left := [process for process in processes if is_running(process)]:
            assert time.monotonic() < end, left
            time.sleep(0.02)
        names = [f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}" for process in processes]
        assert not {*names} & {*os.listdir("/dev/shm")} - self.before
        return status, seconds


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("VLLM::Worker")
    except psutil.NoSuchProcess:
        return False


def broken_demo(folder: Path) -> Path:
    """A copy of the demo with a number that is not one."""
    checkpoint = folder / "checkpoint"
    shutil.copytree(DEMO, checkpoint)
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return checkpoint


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
    folder: Path, *flags: str, checkpoint: Path = DEMO, **variables: str
) -> Iterator[Command]:
    command = Command(folder, flags, variables, checkpoint)
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
# A whole start each; the others hear a signal in every way that there is, and ``test_console`` has
# what ends the processes of a server.
MORE_MOMENTS = [
    ("before vLLM is imported", interrupt_group, "", EAGER, QUIET),
    ("it compiles", interrupt_group, "load the weights", (), QUIET),
    ("the engine begins", terminate, "Initializing a V1 LLM engine", EAGER, LOG),
    ("the model is built", terminate, "Starting to load model", EAGER, LOG),
    ("the weights are loaded", terminate, "Loading weights took", EAGER, LOG),
    ("it compiles", terminate, "Warming up model for the compilation", (), LOG),
    ("the first request runs", terminate, "compile, warm up", EAGER, QUIET),
]


def named(moments, *marks) -> list:
    return [pytest.param(*row, id=f"{row[0]}: {row[1].__name__}", marks=marks) for row in moments]


@pytest.mark.parametrize(
    ("name", "send", "text", "flags", "variables"),
    [*named(MOMENTS), *named(MORE_MOMENTS, pytest.mark.exhaustive)],
)
def test_a_signal_ends_a_start(tmp_path, name, send, text, flags, variables):
    with begun(tmp_path, *flags, **variables) as command:
        if text:
            command.wait_for(text)
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


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Command]:
    """A server that became ready, with nothing asked for."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(KEY)
    variables = {"VLLM_CPU_KVCACHE_SPACE": ""}  # the size is the command's own choice
    with begun(folder, "--api-key-file", str(keys), *EAGER, **variables) as command:
        command.wait_for('"prompt": ')  # in the last line
        yield command


def test_a_start_says_what_is_served_how_and_where(server):
    said = [*server.out, *server.err]
    assert len(said) <= 20, said
    assert server.err == []
    text = "\n".join(said)
    for fact in (
        *("format house", "family llama", "4 blocks", "17 sites"),
        *("algorithm single_pass", "backend cpp"),
        "KV cache  1.0 GiB, 262,144 tokens",
    ):
        assert fact in text
    for phase in ("import vLLM", "load the weights", "compile, warm up"):
        assert re.search(rf"  {phase} +\d+\.\d s", text)
    assert said[-3].startswith(f"curl http://127.0.0.1:{server.port}/v1/completions -H ")
    assert '{"model": "checkpoint", "prompt": ' in said[-1]
    for path in ("/v1", "/attn_res", "/metrics"):
        assert f"http://127.0.0.1:{server.port}{path}\n" in text + "\n"


def test_libraries_of_the_environment_are_preloaded(server):
    libraries = [str(path) for path in preload.libraries()]
    if not libraries:
        pytest.skip("there are none")
    for process in tree(server.process.pid):
        words = process.cmdline()  # none of a process that ends, and a compiler is none of ours
        ours = words and ("python" in words[0] or words[0].startswith("VLLM"))
        if ours and "resource_tracker" not in " ".join(words):
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
            assert all(os.path.realpath(path) in mapped for path in libraries)


def test_the_key_is_nowhere_to_be_read(server):
    lists = [f"/proc/{server.process.pid}/{name}" for name in ("cmdline", "environ")]
    for path in (*lists, *server.files):
        assert KEY.encode() not in Path(path).read_bytes()
    assert b"api-key-file" in Path(lists[0]).read_bytes()


def test_requests_are_shown_and_probes_are_not(server):
    before = len(server.out)
    address, header = f"http://127.0.0.1:{server.port}", {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=header, timeout=60) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/").headers["location"] == "attn_res"
        body = {"prompt": "import os", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
    server.wait_for("POST /v1/completions")
    said = server.out[before:]
    assert len(said) == 2, said
    assert "GET / " in said[0] and "POST /v1/completions" in said[1]


def test_ctrl_c_stops_a_ready_server(server):
    """The last test of that server."""
    (log,) = re.findall(r"^  log +(\S+) ", "\n".join(server.out), re.M)
    assert "WARNING" in Path(log).read_text()
    before = len(server.out), len(server.err)
    status, seconds = server.end(interrupt_group)
    print(f"stopped after {seconds:.1f} s")
    assert status == 0
    # On a busy machine an engine does not end within vLLM's 5 s, and vLLM says that it kills it.
    assert not [line for line in server.out[before[0] :] if "kill" not in line]
    (sentence,) = server.err[before[1] :]
    assert sentence.startswith("attnres-serve: stopping;")
    assert not Path(log).exists()


@pytest.mark.exhaustive
def test_verbose_shows_the_log_of_vllm(tmp_path):
    with begun(tmp_path, "--verbose", *EAGER) as command:
        command.wait_for("Application startup complete")
        text = "\n".join(command.out)
        assert len(command.out) > 40
        for words in (
            "Initializing a V1 LLM engine",
            "Loading weights took",
            "Route: /v1/attn_res",
        ):
            assert words in text
        time.sleep(1)
        before = len(command.out), len(command.err)
        status, _ = command.end(terminate)
        assert status == 0
        said = [*command.out[before[0] :], *command.err[before[1] :]]
        assert not NOISE.search("\n".join(said)), said


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
def test_a_failed_start_says_what_a_worker_said(tmp_path):
    checkpoint = broken_demo(tmp_path)
    with begun(tmp_path, *EAGER, checkpoint=checkpoint) as command:
        assert command.process.wait(START_TIMEOUT) == 1
        reason, _ = reason_and_log(command)
        assert reason.startswith("the tensor model.norm.weight holds nan at [0], ")


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
        assert re.match(r"\S+ was killed by signal 9, and then \w+", reason)
