"""Engines that a launcher runs beside the servers that ask them (--data-parallel-size).

vLLM lets the launcher alone see one die, which then ends the servers.  It kills them before they
have answered, as nobody told them what their requests wait for.
"""

import os
from typing import Any


def running() -> list[Any]:
    """The engines that the parent of this process runs, as psutil's processes."""
    import psutil  # vLLM requires it

    try:
        children = psutil.Process(os.getppid()).children()
    except psutil.Error:  # the parent has ended, or is another user's
        return []
    return [process for process in children if _is_engine(process)]


def _is_engine(process: Any) -> bool:
    import psutil

    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:  # another one, that has just ended
        return False


def has_ended(process: Any) -> bool:
    """Whether a process has, be its parent aware of that or not."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def declare_dead(client: Any) -> None:
    """Have a client fail its requests and refuse others, as if an engine had told its end."""
    from vllm.v1.engine.exceptions import EngineDeadError

    client.engine_core.resources.engine_dead = True
    client.engine_core.outputs_queue.put_nowait(EngineDeadError())
