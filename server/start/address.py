"""The address of a server, a port or a socket file, validated before anything slow."""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from attnres_serve.errors import SettingError

BOUND = Path("/proc/net/unix")


def check_port(host: str, port: int) -> None:
    """Raise SettingError if the address cannot be bound."""
    if not 0 <= port <= 65535:  # getaddrinfo would use the lower 16 bits
        raise SettingError(f"{port} is an invalid port; choose one from 0 to 65535 with --port.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = (
            "is in use"
            if getattr(error, "errno", None) == errno.EADDRINUSE
            else f"cannot be bound ({error})"
        )
        raise SettingError(
            f"{host}:{port} {reason}; choose another address with --host and --port."
        ) from None


def drop_socket(path: str) -> None:
    """Remove the socket file of an ended server, unless something else has taken its path."""
    with suppress(SettingError):
        clear_socket(path)


def clear_socket(path: str) -> None:
    """Remove the socket file that vLLM's server left behind when it ended.

    Raises:
        SettingError: a server uses it, it is another kind of file, or no socket can be made there.
    """
    choose = "choose another path with --uds"
    try:
        kind = os.stat(path).st_mode
    except OSError:
        kind = None
    if kind is not None and not stat.S_ISSOCK(kind):
        what = "folder" if stat.S_ISDIR(kind) else "file"
        raise SettingError(f"{path} is a {what} and no socket; {choose}.")
    if kind is not None and _is_used(path):
        raise SettingError(f"{path} is in use by another server; stop that one, or {choose}.")
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"no socket can be made at {path} ({reason}); {choose}.") from None


def _is_used(path: str) -> bool:
    """Whether a server listens on a socket, or has bound it during its start."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            pass
        except OSError:
            return True
        else:
            return True
    with suppress(OSError):
        bound = (line.split(None, 7)[7:] for line in BOUND.read_text().splitlines())
        return any(place in ([path], [str(Path(path).absolute())]) for place in bound)
    return False
