"""Ending vLLM's processes with the process that started them.

A worker whose engine was killed closes its queues. But if it waits for another worker's part of a
sum, or for room in a queue, it keeps waiting on a full core.  An engine does not notice that its
server was killed.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

from attnres_serve.compat.patch import Patch

NAME = "AttnResEndWithParent"


def end_with_parent() -> None:
    """Kill this process after its parent has ended for any reason (idempotent).

    A thread waits for the parent: PR_SET_PDEATHSIG also fires when only the thread that started
    this process ends.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_wait, args=(parent,), name=NAME, daemon=True).start()


def _wait(parent) -> None:
    parent.join()
    while os.getppid() == parent.pid:  # it closes its files before it ends
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


# Names of vLLM's processes for servers, engines and workers.
ENGINE = "EngineCore"
PROCESSES = ("ApiServer_", "APIServer_", ENGINE, "VllmWorker-")


def is_process_of_vllm() -> bool:
    """Whether vLLM started this process for serving."""
    return multiprocessing.current_process().name.startswith(PROCESSES)


def is_engine_of_vllm() -> bool:
    """Whether vLLM started this process as an engine, which schedules requests."""
    return multiprocessing.current_process().name.startswith(ENGINE)


_COORDINATE: Callable | None = None  # vLLM's function, if replaced


def _coordinate(*args, **options) -> None:
    """The function that the coordinator runs."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    run = _COORDINATE or DPCoordinatorProc.run_coordinator  # not replaced in a spawned process
    run(*args, **options)


def _ending_with_parent(original: Callable) -> staticmethod:
    """End the process that coordinates data-parallel engines with its parent.

    It loads no plugins, so the server starts it with ``_coordinate`` instead of vLLM's function.
    """
    global _COORDINATE
    _COORDINATE = original
    return staticmethod(_coordinate)


PATCH = Patch(
    targets=("vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator",),
    make=_ending_with_parent,
    why="the process outlived a killed server",
    models="AttnRes models with `--data-parallel-size`",
    first=(0, 28),
)
