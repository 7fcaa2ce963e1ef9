"""A process of vLLM's that ends with the one that started it.

A worker whose engine was killed closes its queues, but where it waits for another worker's part of
a sum, or for room in a queue, it goes on waiting, on a full core; an engine whose server was killed
does not notice.
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
    """Kill this process once its parent is gone, however that ended (idempotent).

    A thread waits for it: PR_SET_PDEATHSIG would also fire when no more than the thread ends that
    started this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_wait, args=(parent,), name=NAME, daemon=True).start()


def _wait(parent) -> None:
    parent.join()
    while os.getppid() == parent.pid:  # it closes its files before it is gone
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


# Names of the processes in which vLLM runs a server, an engine or a worker.
ENGINE = "EngineCore"
PROCESSES = ("ApiServer_", "APIServer_", ENGINE, "VllmWorker-")


def is_process_of_vllm() -> bool:
    """Whether vLLM started this process, to serve."""
    return multiprocessing.current_process().name.startswith(PROCESSES)


def is_engine_of_vllm() -> bool:
    """Whether vLLM started this process, to schedule requests."""
    return multiprocessing.current_process().name.startswith(ENGINE)


_COORDINATE: Callable | None = None  # vLLM's own, where it is replaced


def _coordinate(*args, **options) -> None:
    """What the coordinator runs."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    run = _COORDINATE or DPCoordinatorProc.run_coordinator  # a spawned process has it as it was
    run(*args, **options)


def _ending_with_parent(original: Callable) -> staticmethod:
    """Let the process that coordinates data-parallel engines end with its parent.

    It loads no plugins, so the server starts ``_coordinate`` there instead of vLLM's function.
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
