"""OpenMP's threads beside drafts of n-grams on CPU.

vLLM 0.32: numba computes these drafts.  At the first one it sets the number of OpenMP threads,
which torch uses too, to the number of cores of the calling thread.  In a worker, whose threads are
bound to cores, that is one.
"""

import sys


def launch_early() -> None:
    """Launch numba's threads early, and restore the number of OpenMP threads (idempotent).

    Called after vLLM has imported numba, and before a draft.
    """
    import torch

    numba = sys.modules.get("numba")  # a later vLLM may do without
    if numba is not None:
        threads = torch.get_num_threads()
        numba.get_num_threads()
        torch._C.set_num_threads(threads)  # vLLM replaces torch's function by a refusal
