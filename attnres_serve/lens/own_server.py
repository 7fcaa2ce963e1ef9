"""A server of the project's own, started for the questions of one caller and then stopped."""

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from attnres_serve import output
from attnres_serve.compat import arguments
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError
from attnres_serve.lens.ask import Server, ServerFailed

HOST = "127.0.0.1"
# The bounds of a server protect it from its clients.  This one has a single client, who started it.
LIFTED = {
    "--max-body-bytes": 2**28,
    "--max-trace-tokens": 2**20,
    "--max-trace-weights": 2**26,
}
# What would give it another address, another key or another protocol.
PLACE = ("host", "port", "uds", "headless", "api_key", "ssl_keyfile", "ssl_certfile")
REFUSED = 2  # exit status of a server that says in one sentence why it does not start
POLL = 0.2  # seconds between two looks at a server that starts
LAST = 60  # seconds for a server to stop; it is killed then
OURS = "attnres-serve: "  # how a sentence of the server's own begins
FAILED = "the server could not be started: "  # and one of a start, which names the start's log
# Lets a server that is started end with the process that started it, however that ends.
BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("whoever started the server has ended")
os.execv(sys.executable, [sys.executable, "-P", "-m", "attnres_serve", *sys.argv[2:]])
"""


@contextmanager
def running(checkpoint: str, flags: Sequence[str], verbose: bool = False) -> Iterator[Server]:
    """Start a server of a checkpoint on a free port of the loopback, for the time of the context.

    Args:
        checkpoint: folder or model id.
        flags: further ones of ``serve``.
        verbose: whether to show what the server writes.

    Raises:
        SettingError: a flag would give it another address, or it does not start, or it fails while
            it is asked.  The sentence has the reason, and the path of a log unless the server
            refused what it was given.
    """
    asked = arguments.among(flags)
    names = [name for name in PLACE if asked.has(name)]
    names += ["api_key_file"] if "--api-key-file" in asked.unknown else []
    for name in names:
        raise SettingError(
            f"--{name.replace('_', '-')} is for a server that others ask, and this one is started "
            "for one question with an address and a key of its own; leave it out, or start "
            "`attnres-serve serve` and give its address."
        )
    port, key = _free_port(), secrets.token_urlsafe(32)
    number, name = tempfile.mkstemp(prefix="attnres-server-", suffix=".log")
    log, is_kept = Path(name), False
    with os.fdopen(number, "wb") as written:
        said = output.err() if verbose else written
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", BOUND, str(os.getpid())),
                *_command(checkpoint, asked, flags),
                *(f"--host={HOST}", f"--port={port}"),
            ],
            env=os.environ | {"VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C is for the caller, who stops the server then
        )
    try:
        _wait_until_ready(process, port, checkpoint, log)
        yield Server(f"http://{HOST}:{port}", key, is_own=True)
    except ServerFailed as error:
        if verbose:
            raise
        is_kept = True
        raise SettingError(f"{error} Its log is {log}.") from None
    finally:
        _stop(process)
        if not is_kept:
            log.unlink(missing_ok=True)


def _command(checkpoint: str, asked: Arguments, flags: Sequence[str]) -> list[str]:
    """The command line, in which flags that are given come last: they outdo ours."""
    ours = ["--enforce-eager", "--max-num-seqs=1", *(f"{name}={n}" for name, n in LIFTED.items())]
    if not asked.served_model_name:
        ours.append(f"--served-model-name={checkpoint}")
    return ["serve", checkpoint, *ours, *flags]


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen, port: int, checkpoint: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        SettingError: it refuses what it was given, or says why it failed and where its log is.
        ServerFailed: it ended without a word of that.
    """
    import httpx

    with httpx.Client(trust_env=False) as client:  # no proxy reaches the loopback
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if client.get(f"http://{HOST}:{port}/health").is_success:
                    return
            time.sleep(POLL)
    last, begin = _last_line(log), f"the server of {checkpoint} did not start: "
    if last.startswith(OURS + FAILED):
        raise SettingError(begin + last.removeprefix(OURS + FAILED))
    reason = last.removeprefix(OURS)
    if process.returncode == REFUSED and reason != last:
        raise SettingError(reason)
    raise ServerFailed(begin + (reason or f"it ended with status {process.returncode}."))


def _last_line(log: Path) -> str:
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace"))
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(LAST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
