"""Output of a command for its user, apart from what libraries write.

While ``libraries_hidden`` lasts, stdout and stderr of this process belong to libraries: whatever
they write in Python, in C++ or in a child process goes to a log, if Python's streams are these
descriptors, as those of a command are.  The command itself writes to ``out()`` and ``err()``.  The
log stays only where a library failed, and the sentence that tells of it has the log's path.
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

# Ours, and those that the command line tells of by itself.
TOLD = (CheckpointError, SettingError, ModuleNotFoundError, BrokenPipeError)

_BEGIN = time.monotonic()
_own: dict[int, TextIO] = {}  # streams of the command's, while libraries are hidden
_verbose = False


def out() -> TextIO:
    """The stdout of the command."""
    return _own.get(1, sys.stdout)


def err() -> TextIO:
    """The stderr of the command."""
    return _own.get(2, sys.stderr)


def is_verbose() -> bool:
    """Whether the user asked to see what libraries write."""
    return _verbose


def say(what: str) -> None:
    """Write what begins to stderr, with the seconds since this command began."""
    print(f"{time.monotonic() - _BEGIN:6.1f} s  {what}", file=err(), flush=True)


def bar(desc: str = "", **options: Any) -> "tqdm":
    """A progress bar that a terminal shows until it ends; elsewhere its descriptions are lines."""
    from tqdm import tqdm

    class Bar(tqdm):
        said = ""

        def set_description_str(self, desc: str | None = None, refresh: bool = True) -> None:
            super().set_description_str(desc, refresh)
            if self.disable and desc and desc != self.said:
                self.said = desc
                say(desc)

        set_description = set_description_str

    is_shown = err().isatty() and _has_width(err())
    made = Bar(file=err(), disable=not is_shown, leave=False, dynamic_ncols=True, **options)
    made.set_description_str(desc)
    return made


def _has_width(terminal: TextIO) -> bool:
    """Whether a terminal has columns; one that nobody looks at may have none, and shows no bar."""
    try:
        columns, _ = os.get_terminal_size(terminal.fileno())
        return columns > 0
    except OSError:
        return True  # tqdm asks elsewhere


def end() -> None:
    """Write what waits, and hide what libraries write while the interpreter ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)


@contextmanager
def libraries_hidden(name: str, verbose: bool = False) -> Iterator[None]:
    """Send what libraries write to a log for the time of the context.

    Args:
        name: what runs, as a sentence and the log's name tell it.
        verbose: whether to show it instead.

    Raises:
        SettingError: a library failed; the sentence has the last reason and the log's path.
    """
    global _verbose
    if verbose:
        _verbose = True
        try:
            yield
        except TOLD:
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
    except TOLD:
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
    """Let the descriptors of stdout and stderr be a log."""
    streams = {1: sys.stdout, 2: sys.stderr}
    saved = {}
    for number, stream in streams.items():
        stream.flush()
        saved[number] = os.dup(number)
        _own[number] = _kept(stream, number)
        os.dup2(log, number)
    try:
        yield
    finally:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(saved[number], number)
            os.close(saved[number])
        own = [_own.pop(number) for number in streams]
        for stream in own:
            if stream not in streams.values():
                stream.close()  # which fails where nobody reads it any more


def _kept(stream: TextIO, number: int) -> TextIO:
    """A stream that goes on to where this one goes, when its descriptor is another file's."""
    try:
        if stream.fileno() != number:
            return stream
    except OSError:  # of a notebook's there is none
        return stream
    return open(os.dup(number), "w", 1, encoding=stream.encoding, errors=stream.errors)
