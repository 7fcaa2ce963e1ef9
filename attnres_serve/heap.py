"""Memory that one step frees is kept for the next, by glibc's own allocator.

By default glibc maps what is large and gives the end of its heap back where more than a threshold
lies free there, so that a prefill may hand back the block bank and the MLP's tensors and fault
them in again: 3700 page faults in every prefill of 512 tokens of a Llama of 768 x 12 with AttnRes
in one process, none in the next, because the threshold moves with what was freed before.  Where
another allocator is preloaded, as in our containers, this changes nothing.
"""

import ctypes

# Parameters of mallopt(3), and their values: no tensor is mapped by itself, 2 GiB may lie free.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
TRIM_THRESHOLD, MMAP_MAX = 2**31 - 1, 0

# The same for a process yet to start.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD), "MALLOC_MMAP_MAX_": str(MMAP_MAX)}


def keep_freed() -> None:
    """Have this process keep the memory that it frees (idempotent)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(M_MMAP_MAX, MMAP_MAX)
