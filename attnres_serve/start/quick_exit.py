"""Ending a vLLM process without finalizing its interpreter.

Finalization takes 5 s of a core in a worker that has compiled a model. Then its engine kills it,
and Triton lists supposed leaks.
"""

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.context import SpawnProcess
from typing import NoReturn

from attnres_serve.start.child import forget_openmp

LAST = -100  # priority among multiprocessing's finalizers; others have 0 and above
PATIENCE = 2.0  # seconds for threads to end; vLLM kills a worker after 5


def instead_of_finalization() -> None:
    """End this multiprocessing process by ``end_now`` after its target has returned.

    A target that raises ends as usual: multiprocessing shows the exception.  So does a forked
    process: its interpreter is not finalized, and its atexit functions belong to its parent.
    """
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        util.Finalize(None, _end_orderly, exitpriority=LAST)


def _end_orderly() -> None:
    error = sys.exc_info()[1]  # what the target raised
    code = getattr(error, "code", 0) or 0
    if error is None or (isinstance(error, SystemExit) and isinstance(code, int)):
        wait_for_threads(code)
        end_now(code)


@contextmanager
def instead_of_unwinding() -> Iterator[None]:
    """End this process by ``end_now`` when an exception or an exit leaves the context.

    In a normal exit nanobind would list leaks of a dead engine, in 30 lines.
    """
    try:
        yield
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise  # Python shows it
        end_now(error.code or 0)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        end_now(1)


def wait_for_threads(status: int) -> None:
    """Wait for non-daemon threads like the interpreter, but at most ``PATIENCE``."""
    done = threading.Event()

    def end_late() -> None:
        if not done.wait(PATIENCE):
            end_now(status)

    threading.Thread(target=end_late, daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]
    done.set()


def end_now(status: int) -> NoReturn:
    """Run atexit functions, flush streams, and end this process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            status = status or 1
    forget_openmp(os.getpid())
    os._exit(status)
