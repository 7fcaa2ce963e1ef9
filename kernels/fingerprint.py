"""Digests of what compiled code depends on, for the keys of the caches that keep it.

Neither vLLM nor torch looks at the processor, or at code that does not appear in a graph, such as
the code that decides which sites there are.
"""

import functools
import hashlib
import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUFFIXES = ".py", ".cpp", ".h"


@functools.cache
def source() -> str:
    """A digest of this package's code."""
    paths = (
        Path(folder, name)
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name.endswith(SUFFIXES)
    )
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@functools.cache
def processor() -> str:
    """A digest of the processor's instructions, because machines may share a cache."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:16]


def vectors() -> str:
    """The vector instructions of torch's compiler: by the processor, ATEN_CPU_CAPABILITY and g++.

    Code that it made for wide ones, built for narrow ones, would leave out half of each vector.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())
