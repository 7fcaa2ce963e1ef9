"""Output of a command for its user, separate from the output of libraries.

During ``libraries_hidden``, stdout and stderr of this process belong to libraries: their output
from Python, C++ or child processes goes to a log, if Python's streams use these descriptors, as in
a command.  The command itself writes to ``out()`` and ``err()``.  The log stays only if a library
fails; then the error names the log's path.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from attnres_serve import sentences
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.start import failures
from attnres_serve.start.engine_log import EngineLog

if TYPE_CHECKING:
    from tqdm import tqdm

# Our errors, and others that the command line reports itself.
REPORTED = (CheckpointError, SettingError, ModuleNotFoundError, BrokenPipeError)

_BEGIN = time.monotonic()
_streams: dict[int, TextIO] = {}  # the command's streams, while libraries are hidden
_verbose = False


def out() -> TextIO:
    """The stdout of the command."""
    return _streams.get(1, sys.stdout)


def err() -> TextIO:
    """The stderr of the command."""
    return _streams.get(2, sys.stderr)


def is_verbose() -> bool:
    """Whether the user wants to see the output of libraries."""
    return _verbose


def say(what: str) -> None:
    """Write a step to stderr, with the seconds since the start of the command."""
    print(f"{time.monotonic() - _BEGIN:6.1f} s  {what}", file=err(), flush=True)


def bar(desc: str = "", **options: Any) -> "tqdm":
    """A progress bar, removed at its end; without a terminal its descriptions become lines."""
    from tqdm import tqdm

    class Bar(tqdm):
        last_desc = ""

        def set_description_str(self, desc: str | None = None, refresh: bool = True) -> None:
            super().set_description_str(desc, refresh)
            if self.disable and desc and desc != self.last_desc:
                self.last_desc = desc
                say(desc)

        set_description = set_description_str

    is_shown = err().isatty() and _has_width(err())
    made = Bar(file=err(), disable=not is_shown, leave=False, dynamic_ncols=True, **options)
    made.set_description_str(desc)
    return made


def _has_width(terminal: TextIO) -> bool:
    """Whether a terminal has columns; a detached one may have none, and gets no bar."""
    try:
        columns, _ = os.get_terminal_size(terminal.fileno())
        return columns > 0
    except OSError:
        return True  # tqdm finds the width elsewhere


def end() -> None:
    """Flush streams, and hide the output of libraries while the interpreter ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)


@contextmanager
def libraries_hidden(name: str, verbose: bool = False) -> Iterator[None]:
    """Send the output of libraries to a log during the context.

    Args:
        name: of the command, for messages and the log's name.
        verbose: whether to show the output instead.

    Raises:
        SettingError: a library failed; the message has the last reason and the log's path.
    """
    global _verbose
    if verbose:
        _verbose = True
        try:
            yield
        except REPORTED:
            raise
        except Exception as error:
            traceback.print_exc()
            raise SettingError(f"{name} failed; the reason stands above.") from error
        finally:
            _verbose = False
        return
    log = EngineLog(name)
    try:
        with log.heard(), _sent_to(log.file):
            yield
    except REPORTED:
        raise
    except Exception as error:
        log.is_kept = True
        log.write(traceback.format_exc().encode(errors="backslashreplace"))
        why = log.reason or failures.reason_of(error)
        raise SettingError(
            sentences.between(f"{name} failed (", why, f"); its log is {log.path}.")
        ) from error
    finally:
        log.close()


@contextmanager
def _sent_to(log: int) -> Iterator[None]:
    """Redirect the descriptors of stdout and stderr to a log."""
    streams = {1: sys.stdout, 2: sys.stderr}
    saved = {}
    for number, stream in streams.items():
        stream.flush()
        saved[number] = os.dup(number)
        _streams[number] = _kept(stream, number)
        os.dup2(log, number)
    try:
        yield
    finally:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(saved[number], number)
            os.close(saved[number])
        kept = [_streams.pop(number) for number in streams]
        for stream in kept:
            if stream not in streams.values():
                stream.close()  # fails if its reader is gone


def _kept(stream: TextIO, number: int) -> TextIO:
    """A copy of a stream that keeps its target when its descriptor is redirected."""
    try:
        if stream.fileno() != number:
            return stream
    except OSError:  # a notebook's stream has no descriptor
        return stream
    return open(os.dup(number), "w", 1, encoding=stream.encoding, errors=stream.errors)
