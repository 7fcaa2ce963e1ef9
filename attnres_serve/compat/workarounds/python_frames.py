"""Allocating one large frame chunk before a hot loop, so that no call in it maps memory.

CPython keeps frames in chunks of 16 KiB.  If a chunk ends just above a hot function, every call
maps a new chunk and every return unmaps it.  This depends on the size of all frames on the stack,
including generated code: it happened in vLLM's attention of a compiled Llama of 1024 x 28 with
standard residuals, three times per layer, and cost a tenth of a decode step.

The allocation maps memory itself, so it is for long-running functions: an engine's loop, no step.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from attnres_serve.compat.patch import Patch

SLOTS = 1 << 15  # of 8 bytes: such a frame gets a chunk of 512 KiB, half of it for its callees


def call_with_room(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function``, whose callees have room for a thousand frames in one chunk."""
    return function(*args)


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=SLOTS)


def with_room(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called with room."""

    @wraps(function)
    def roomy(*args: Any) -> Any:
        return call_with_room(function, *args)

    return roomy


PATCH = Patch(  # the loop of a process after its model is built
    targets=(
        "vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
        "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_busy_loop",
    ),
    make=with_room,
    why="function calls mapped memory in every decode step",
    models="AttnRes models",
    first=(0, 28),
)
