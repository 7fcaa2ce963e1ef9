"""A temporary server: started for the requests of one caller, and then stopped."""

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

# The bounds of a server protect it from its clients.  The only client of this one started it.
LIFTED = {
    "--max-body-bytes": 2**28,
    "--max-trace-tokens": 2**20,
    "--max-trace-weights": 2**26,
    "--max-trace-bytes": 2**40,
}
# Flags that would change its address, its key or its protocol.
PLACE = ("host", "port", "uds", "headless", "api_key", "ssl_keyfile", "ssl_certfile")


@contextmanager
def running(
    checkpoint: str,
    flags: Sequence[str],
    verbose: bool = False,
    show: Callable[[str], object] = lambda phase: None,
) -> Iterator[Server]:
    """Run a server of a checkpoint on a free port of 127.0.0.1 while the context is open.

    Args:
        checkpoint: folder or model id.
        flags: further flags of ``serve``.
        verbose: whether to show the server's output.
        show: called with each phase of the start when it begins.

    Raises:
        SettingError: a flag would change the address, or the server does not start, or it fails
            during a request.  The message has the reason and, unless the server refused its input,
            the path of a log.
    """
    vllm_arguments = arguments.among(flags)
    names = [name for name in PLACE if vllm_arguments.has(name)]
    other_flags = {argument.partition("=")[0] for argument in vllm_arguments.unknown}
    names += ["api_key_file"] if "--api-key-file" in other_flags else []
    for name in names:
        raise SettingError(
            f"--{name.replace('_', '-')} is for a server that others ask, and this one is started "
            "for one question with an address and a key of its own; leave it out, or start "
            "`attnres-serve serve` and give its address."
        )
    port, key = child.free_port(), secrets.token_urlsafe(32)
    log = engine_log.EngineLog("server")
    stream = output.err() if verbose else log.file
    try:
        with child.running(
            [
                *(sys.executable, "-P", "-m", "attnres_serve"),
                *_command(checkpoint, vllm_arguments, flags),
                *(f"--host={child.HOST}", f"--port={port}"),
            ],
            env=arguments.without_flags(os.environ) | log.variables | {"VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # a Ctrl-C reaches only the caller, which then stops the server
        ) as process:
            show(f"starting a server: {next(iter(events.PHASES.values()))}")
            if not child.serves(process, port, lambda: _show(log, show)):
                raise _failure(checkpoint, log, process.returncode)
            yield Server(f"http://{child.HOST}:{port}", key, is_temporary=True)
    except ServerFailed as error:
        if verbose:
            raise
        log.is_kept = True
        raise SettingError(f"{error} Its log is {log.path}.") from None
    finally:
        log.close()


def _show(log: engine_log.EngineLog, show: Callable[[str], object]) -> None:
    """Show the phases of the start that have begun since the last call."""
    for event in log.events():
        if begun := events.BEGUN.get(event["event"]):
            show(f"starting a server: {begun}")


def _command(checkpoint: str, vllm_arguments: Arguments, flags: Sequence[str]) -> list[str]:
    """The command line; the caller's flags come last and override the defaults."""
    defaults = [
        "--enforce-eager",
        "--max-num-seqs=1",
        *(f"{name}={n}" for name, n in LIFTED.items()),
    ]
    if not vllm_arguments.served_model_name:
        defaults.append(f"--served-model-name={checkpoint}")
    return ["serve", checkpoint, *defaults, *flags]


def _failure(checkpoint: str, log: engine_log.EngineLog, status: int) -> SettingError:
    """Why a server did not start; a ServerFailed if the log gives no reason."""
    kind = SettingError if log.reason else ServerFailed
    if log.refusal:
        return SettingError(log.refusal)
    return kind(f"the server of {checkpoint} did not start: {log.why(status)}.")
