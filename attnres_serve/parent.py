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
