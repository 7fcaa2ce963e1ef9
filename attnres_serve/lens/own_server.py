"""A server of the project's own, started for the questions of one caller and then stopped."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from attnres_serve import output
from attnres_serve.compat import arguments
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError
from attnres_serve.lens.ask import Server, ServerFailed
from attnres_serve.start import child, engine_log, events

# The bounds of a server protect it from its clients.  This one has a single client, who started it.
LIFTED = {
    "--max-body-bytes": 2**28,
    "--max-trace-tokens": 2**20,
    "--max-trace-weights": 2**26,
    "--max-trace-bytes": 2**40,
}
# What would give it another address, another key or another protocol.
PLACE = ("host", "port", "uds", "headless", "api_key", "ssl_keyfile", "ssl_certfile")


@contextmanager
def running(
    checkpoint: str,
    flags: Sequence[str],
    verbose: bool = False,
    show: Callable[[str], object] = lambda phase: None,
) -> Iterator[Server]:
    """Start a server of a checkpoint on a free port of the loopback, for the time of the context.

    Args:
        checkpoint: folder or model id.
        flags: further ones of ``serve``.
        verbose: whether to show what the server writes.
        show: told each phase of the start as it begins.

    Raises:
        SettingError: a flag would give it another address, or it does not start, or it fails while
            it is asked.  The sentence has the reason, and the path of a log unless the server
            refused what it was given.
    """
    asked = arguments.among(flags)
    names = [name for name in PLACE if asked.has(name)]
    theirs = {word.partition("=")[0] for word in asked.unknown}
    names += ["api_key_file"] if "--api-key-file" in theirs else []
    for name in names:
        raise SettingError(
            f"--{name.replace('_', '-')} is for a server that others ask, and this one is started "
            "for one question with an address and a key of its own; leave it out, or start "
            "`attnres-serve serve` and give its address."
        )
    port, key = child.free_port(), secrets.token_urlsafe(32)
    log = engine_log.EngineLog("server")
    said = output.err() if verbose else log.file
    try:
        with child.running(
            [
                *(sys.executable, "-P", "-m", "attnres_serve"),
                *_command(checkpoint, asked, flags),
                *(f"--host={child.HOST}", f"--port={port}"),
            ],
            env=arguments.without_flags(os.environ) | log.variables | {"VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C is for the caller, who stops the server then
        ) as process:
            show(f"starting a server: {next(iter(events.PHASES.values()))}")
            if not child.serves(process, port, lambda: _show(log, show)):
                raise _failure(checkpoint, log, process.returncode)
            yield Server(f"http://{child.HOST}:{port}", key, is_own=True)
    except ServerFailed as error:
        if verbose:
            raise
        log.is_kept = True
        raise SettingError(f"{error} Its log is {log.path}.") from None
    finally:
        log.close()


def _show(log: engine_log.EngineLog, show: Callable[[str], object]) -> None:
    """Show the phases that have begun since the last call."""
    for event in log.events():
        if begun := events.BEGUN.get(event["event"]):
            show(f"starting a server: {begun}")


def _command(checkpoint: str, asked: Arguments, flags: Sequence[str]) -> list[str]:
    """The command line, in which flags that are given come last: they outdo ours."""
    ours = ["--enforce-eager", "--max-num-seqs=1", *(f"{name}={n}" for name, n in LIFTED.items())]
    if not asked.served_model_name:
        ours.append(f"--served-model-name={checkpoint}")
    return ["serve", checkpoint, *ours, *flags]


def _failure(checkpoint: str, log: engine_log.EngineLog, status: int) -> SettingError:
    """Why a server did not start; a ServerFailed if it has told neither a reason nor its log."""
    kind = SettingError if log.reason else ServerFailed
    if log.refusal:
        return SettingError(log.refusal)
    return kind(f"the server of {checkpoint} did not start: {log.why(status)}.")
