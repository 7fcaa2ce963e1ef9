"""A process that has imported vLLM and forks: ``python zygote.py PATH``, driven by ``forks``.

A start spends most of its time on imports, which a fork inherits.  Its stdin is a socket that
listens at the path, for every process of a test run.  A request is a line of JSON: {id, argv: as
after `python`, env: all variables, out, err: files for the output}.  Answers are lines of JSON:
{id, pid} and, at the end of that process, {id, status} as in ``subprocess``.  Ends with the last
connection.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import setproctitle
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry
from vllm.platforms import cpu
from vllm.utils import system_utils
from vllm.v1.sample.ops import logprobs

IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "attnres_serve.cli",
    "attnres_serve.model.causal_lm",
)


def main() -> None:
    """Fork what is asked for.  Returns in the processes that it forks, and when nobody asks."""
    path, listening = Path(sys.argv[1]), socket.socket(fileno=os.dup(0))
    listening.setblocking(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    registry._run_in_subprocess = lambda inspect: inspect()  # a subprocess would import vLLM anew
    # Every process that answers with logprobs would compile it for seconds, if eager as well.
    logprobs.batched_count_greater_than = logprobs.batched_count_greater_than.__wrapped__
    if hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        # Whoever waits for another process spins for a second, on a core that a test needs.
        # One that sleeps earlier can miss a notification, so it looks again by itself.
        shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0005,)  # seconds
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 1
    cpu.GiB_bytes = 1 << 26  # of VLLM_CPU_KVCACHE_SPACE: to clear a gigabyte is a tenth of a start
    for name in IMPORTED:
        importlib.import_module(name)
    if hasattr(cpu.CpuPlatform, "register_triton_kernel_overrides"):
        # Once for all forks: it looks at every name of every module.
        cpu.CpuPlatform.register_triton_kernel_overrides()
        cpu.CpuPlatform.register_triton_kernel_overrides = lambda self: None
    setproctitle.getproctitle()  # finds the place of titles, which it cannot in another environment
    # A collection in a fork would look at, and so copy, all that it inherits.  Engines unfreeze it.
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for end in (listening, ended):
        selector.register(end, selectors.EVENT_READ)
    running: dict[int, tuple[socket.socket, int]] = {}
    rests: dict[socket.socket, bytes] = {}  # what came of a request that is not whole yet

    def answer(connection: socket.socket, **fields: int) -> None:
        with suppress(OSError):  # it has gone
            connection.sendall(json.dumps(fields).encode() + b"\n")

    def accept() -> None:
        connection, _ = listening.accept()
        connection.setblocking(True)
        rests[connection] = b""
        selector.register(connection, selectors.EVENT_READ)

    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                accept()
                continue
            if key.fileobj == ended:
                os.read(ended, 65536)
                while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
                    pid, status = found
                    connection, number = running.pop(pid)
                    answer(connection, id=number, status=os.waitstatus_to_exitcode(status))
                continue
            connection = key.fileobj
            data = b""
            with suppress(OSError):  # it was killed
                data = connection.recv(65536)
            if not data:
                selector.unregister(connection)
                del rests[connection]
                connection.close()
                continue
            *lines, rests[connection] = (rests[connection] + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if not pid:
                    selector.close()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (listening, *rests):
                        end.close()
                    for end in (ended, wake):
                        os.close(end)
                    become(**request)
                    return
                running[pid] = connection, request["id"]
                answer(connection, id=request["id"], pid=pid)
        if not rests:
            path.unlink(missing_ok=True)  # nobody finds it from now on
            with suppress(BlockingIOError):
                accept()  # who has found it before
            if not rests:
                return


def become(id: int, argv: list[str], env: dict[str, str], out: str, err: str) -> None:
    """Run what ``python *argv`` would run, as ``__main__``."""
    for path, end in ((out, 1), (err, 2)):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, end)
        os.close(output)
    if out == err:
        os.dup2(1, 2)  # one place in the file for both
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if argv[0] == "-m":
        sys.argv[:] = ["-m", *argv[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
