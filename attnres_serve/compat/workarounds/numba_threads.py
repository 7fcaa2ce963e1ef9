"""OpenMP's threads beside drafts of n-grams on CPU.

vLLM 0.32: numba finds these drafts.  With the first one it gives OpenMP, which torch computes by, a
thread for each core that the calling thread may use.  That is one in a worker, whose threads are
bound to cores.
"""

import sys


def launch_early() -> None:
    """Let numba do so at once, and give OpenMP its threads back (idempotent).

    Called after vLLM has imported numba, and before a draft.
    """
    import torch

    numba = sys.modules.get("numba")  # a later vLLM may do without
    if numba is not None:
        threads = torch.get_num_threads()
        numba.get_num_threads()
        torch._C.set_num_threads(threads)  # vLLM puts a refusal in the place of torch's function
