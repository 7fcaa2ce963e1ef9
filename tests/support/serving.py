"""Start servers and command lines for tests, ask them, stop them."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
import httpx

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DEMO = TESTS.parent / "examples" / "demo" / "checkpoint"
GOLDENS = TESTS / "goldens"
FAMILY_GOLDENS = TESTS / "family_goldens"
START_TIMEOUT = 420  # seconds; a compiled start takes 40 to 100 on two cores


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen | forks.Forked
    log: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # uvicorn ends a connection that was idle for five seconds, perhaps as it is used again.
        limits = httpx.Limits(keepalive_expiry=1)
        self.client = httpx.Client(base_url=self.url, timeout=300, limits=limits)

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """Greedy completion; ``prompt`` is text, token ids or a list of those."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **options}
        return self.client.post("/v1/completions", json=body).raise_for_status().json()

    @property
    def info(self) -> dict[str, Any]:
        return self.get("/v1/attn_res")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# One cache for all servers of a test run: it spares each of them the inspection of model classes.
CACHE = tempfile.TemporaryDirectory(prefix="attnres-serve-tests-")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a server: small KV cache, nothing fetched, no interpreter for Triton."""
    kept = forks.without_own(os.environ)
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": CACHE.name}
    return kept | own | ({} if forks.AS_USERS else forks.ONE_THREAD) | extra


OURS = (sys.executable, "-m", "attnres_serve", "serve")
VLLMS = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")


@contextmanager
def running(
    command: tuple[str, ...],
    checkpoint: Path,
    log: Path,
    *flags: str,
    port: int | None = None,
    fresh: bool = False,
    **env: str,
) -> Iterator[Server]:
    """A server of ``checkpoint``, started and stopped.

    Args:
        command: ``OURS`` or ``VLLMS``.
        checkpoint: folder.
        log: where its output goes.
        port: default: one that is free.
        fresh: begin with nothing imported and spawn processes, as users do; it takes 20 s more.
        flags, env: further flags and environment variables.
    """
    port = port or free_port()
    arguments = [*command, str(checkpoint), "--host", "127.0.0.1", "--port", str(port), *flags]
    # The whole log, for whoever reads why a test failed.
    variables = environment(**{"VLLM_LOGGING_LEVEL": "INFO"} | env)
    process = forks.begin(arguments, log, variables, env, fresh)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        server.client.close()
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_demo(log: Path, *flags: str, fresh: bool = False, **env: str) -> Iterator[Server]:
    """``attnres-serve serve`` with the demo checkpoint, eager, as ``demo``."""
    names = ("--enforce-eager", "--served-model-name", "demo")
    with running(OURS, DEMO, log, *names, *flags, fresh=fresh, **env) as server:
        yield server


def draft_of_the_demo(folder: Path) -> Path:
    """A draft as the documentation has it made."""
    script = ROOT / "examples" / "demo" / "draft.py"
    subprocess.run([sys.executable, script, folder], check=True, timeout=120)
    return folder


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended while starting:\n{tail(server.log)}")
        try:
            if server.client.get("/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise TimeoutError(f"no answer after {START_TIMEOUT} s:\n{tail(server.log)}")


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def run_module(*words: str, timeout: float, status: int = 0, **env: str) -> str:
    """What ``python -m`` says on stdout; it must end well within ``timeout`` seconds.

    Args:
        words: behind ``-m``.
        timeout: seconds.
        status: the expected one.
        env: further environment variables, none that is read by imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = forks.python("-m", *words, log=out, err=err, env=environment(**env))
        try:
            ended = process.wait(timeout)
        finally:
            process.kill()
        assert ended == status, err.read_text(errors="replace")[-6000:]
        return out.read_text()


def document_of(main: Callable[..., int], out: Path, capsys: Any, *words: str) -> dict[str, Any]:
    """The document of a benchmark that this process runs, which shows the same."""
    assert main([*words, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document == json.loads(capsys.readouterr().out)
    return document


def run_benchmark(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """The document of a benchmark, run by its command line; it is the same in the file ``out``."""
    said = run_module(f"benchmarks.{name}", *arguments, "--out", str(out), timeout=1700)
    document = json.loads(said.splitlines()[-1])
    assert document == json.loads(out.read_text())
    return document
