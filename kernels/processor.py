"""What kind of processor this is, for the keys of what was compiled for it."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def features() -> str:
    """A digest of the instructions that the processor has; caches are shared by machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    told = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
