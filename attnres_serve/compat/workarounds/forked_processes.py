"""The processes of engines and workers on a CPU, which begin with what their server has imported.

vLLM 0.32 forks them on GPUs.  On CPUs it spawns them, and each imports vLLM anew, which is more
than half of a start.  Intel's OpenMP begins anew in a fork and reads its cores there, as it does in
a process that is spawned; GNU's reads them only when it is loaded, and needs those.
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
        # A collection in a fork would look at, and so copy, all that it inherits; vLLM has three.
        gc.collect()
        gc.freeze()
        super().start()

    def run(self) -> None:
        from vllm import plugins

        signal.set_wakeup_fd(-1)  # the server's loop would take our signals for its own
        if orphans.is_engine_of_vllm():
            # OpenMP binds the thread that forks to one core, which its workers would inherit.
            os.sched_setaffinity(0, self._cores)
        plugins.plugins_loaded = False  # they are for each process
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
    """Have the engines of this server, and their workers, fork (idempotent)."""
    if "libiomp" in os.environ.get("LD_PRELOAD", ""):
        PATCH.apply()
