"""Keeping freed memory between steps in glibc's allocator.

By default glibc returns large freed blocks to the kernel, and the next prefill faults them in
again: 3700 page faults in every prefill of 512 tokens of a Llama of 768 x 12 with AttnRes in one
process, none in the next, because the thresholds depend on earlier frees.  Fixed thresholds keep
the tensors of a step, and still return much larger blocks.  With another preloaded allocator, as in
our containers, this has no effect.
"""

import ctypes

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_THRESHOLD = 2**30
MMAP_THRESHOLDS = 2**28, 2**25  # older versions of glibc take no more than 32 MiB


def keep_freed() -> dict[str, str]:
    """Keep freed memory in this process (idempotent).

    Returns:
        The environment for the same in another process; empty if the C library does not support it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    for threshold in MMAP_THRESHOLDS:
        if mallopt(M_MMAP_THRESHOLD, threshold):
            mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
            return {
                "MALLOC_MMAP_THRESHOLD_": str(threshold),
                "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD),
            }
    return {}
