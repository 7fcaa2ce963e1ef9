"""Output of a command for its user, apart from what libraries write.

While ``libraries_hidden`` lasts, stdout and stderr of this process belong to libraries: whatever
they write in Python, in C++ or in a child process goes to a log.  The command itself writes to
``out()`` and ``err()``.  The log stays only where a library failed, and the sentence that tells of
it has the log's path.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from attnres_serve.compat import failures
from attnres_serve.compat.engine_log import EngineLog
from attnres_serve.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from tqdm import tqdm

# Ours, and those that the command line tells of by itself.
TOLD = (CheckpointError, SettingError, ModuleNotFoundError, BrokenPipeError)

_own: dict[str, TextIO] = {}  # streams of the command's, while libraries are hidden
_theirs: dict[str, TextIO] = {}  # made once, because a library may keep the one it finds
_log: EngineLog | None = None  # while libraries are hidden
_verbose = False


def out() -> TextIO:
    """The stdout of the command."""
    return _own.get("stdout", sys.stdout)


def err() -> TextIO:
    """The stderr of the command."""
    return _own.get("stderr", sys.stderr)


def is_verbose() -> bool:
    """Whether the user asked to see what libraries write."""
    return _verbose


def reason() -> str | None:
    """Why an engine failed while libraries are hidden; None if no process of it told."""
    return _log.reason if _log else None


def bar(**options: Any) -> "tqdm":
    """A progress bar that a terminal shows until it ends, and nothing else does."""
    from tqdm import tqdm

    return tqdm(file=err(), disable=not err().isatty(), leave=False, dynamic_ncols=True, **options)


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
    global _log, _verbose
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
    log, keep = EngineLog(name), False
    _log = log
    try:
        with log.heard(), _sent_to(log.file):
            try:
                yield
            except TOLD:
                raise
            except Exception as error:
                keep = True
                traceback.print_exc()
                why = log.reason or failures.reason_of(error)
                raise SettingError(f"{name} failed ({why}); its log is {log.path}.") from error
    finally:
        _log = None
        log.close(keep)


@contextmanager
def _sent_to(log: int) -> Iterator[None]:
    """Let stdout and stderr be a log."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    saved = {}
    for number, name in enumerate(before, 1):
        before[name].flush()
        saved[number] = os.dup(number)
        _own[name] = _kept(before[name], number)
        os.dup2(log, number)
        if name not in _theirs:
            _theirs[name] = open(  # noqa: SIM115
                number, "w", 1, errors="backslashreplace", closefd=False
            )
        setattr(sys, name, _theirs[name])
    moved = [*_handlers(before)]
    for handler, name in moved:
        handler.setStream(_theirs[name])
    try:
        yield
    finally:
        for handler, name in moved:
            handler.setStream(before[name])
        for number, name in enumerate(before, 1):
            _theirs[name].flush()
            os.dup2(saved[number], number)
            os.close(saved[number])
            setattr(sys, name, before[name])
        own = [_own.pop(name) for name in before]
        for stream in own:
            if stream in before.values():
                stream.flush()
            else:
                stream.close()  # which fails where nobody reads it any more


def _kept(stream: TextIO, number: int) -> TextIO:
    """A stream that goes on to where this one goes, when its descriptor is another file's."""
    try:
        if stream.fileno() != number:
            return stream
    except OSError:  # of a notebook's there is none
        return stream
    return open(os.dup(number), "w", 1, encoding=stream.encoding, errors=stream.errors)


def _handlers(streams: dict[str, TextIO]) -> Iterator[tuple[logging.StreamHandler, str]]:
    """Handlers of loggers that write to one of some streams, and the name of that stream."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            for name, stream in streams.items():
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    yield handler, name
