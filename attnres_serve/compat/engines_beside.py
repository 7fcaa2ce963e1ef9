"""Engines that a launcher runs beside its servers (--data-parallel-size).

In vLLM only the launcher notices the death of an engine, and then kills the servers before they
have answered.
"""

import os
from typing import Any


def running() -> list[Any]:
    """The engines of this process's parent, as psutil processes."""
    import psutil  # vLLM requires it

    try:
        children = psutil.Process(os.getppid()).children()
    except psutil.Error:  # the parent has ended, or belongs to another user
        return []
    return [process for process in children if _is_engine(process)]


def _is_engine(process: Any) -> bool:
    import psutil

    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def has_ended(process: Any) -> bool:
    """Whether a process has ended, even if its parent has not noticed."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def declare_dead(client: Any) -> None:
    """Let a client fail its requests and refuse others, as after an engine's death message."""
    from vllm.v1.engine.exceptions import EngineDeadError

    client.engine_core.resources.engine_dead = True
    client.engine_core.outputs_queue.put_nowait(EngineDeadError())
