"""Forked processes of engines and workers on a CPU, which keep their server's imports.

vLLM 0.32 forks them on GPUs.  On CPUs it spawns them, and each imports vLLM anew, which takes more
than half of a start.  Intel's OpenMP restarts in a fork and reads its cores there, like in a
spawned process; GNU's reads them only when it is loaded, and needs spawned processes.
"""

import gc
import os
import signal
from multiprocessing.context import ForkContext, ForkProcess

from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds import orphans


class _Process(ForkProcess):
    def start(self) -> None:
        self._cores = os.sched_getaffinity(0)
        # A garbage collection in a fork would copy all inherited memory; vLLM runs three.
        gc.collect()
        gc.freeze()
        super().start()

    def run(self) -> None:
        from vllm import plugins

        signal.set_wakeup_fd(-1)  # otherwise the server's loop would receive our signals
        if orphans.is_engine_of_vllm():
            # OpenMP binds the forking thread to one core, which its workers would inherit.
            os.sched_setaffinity(0, self._cores)
        plugins.plugins_loaded = False  # each process loads them
        super().run()


class _Context(ForkContext):
    Process = _Process  # type: ignore[assignment]


PATCH = Patch(
    targets=(
        "vllm.v1.engine.utils:get_mp_context",
        "vllm.v1.executor.multiproc_executor:get_mp_context",
    ),
    make=lambda original: _Context,
    why="engines and workers on CPU imported vLLM anew, half of a start",
    models="every model of `attnres-serve` on CPU, with Intel's OpenMP",
    first=(0, 28),
)


def begin_imported() -> None:
    """Fork this server's engines and their workers (idempotent)."""
    if "libiomp" in os.environ.get("LD_PRELOAD", ""):
        PATCH.apply()
