"""The compiled libraries of the cpp backend: where they are kept, and how they are made.

One has the operators, and each dtype has one of its kernels: a model needs those of one dtype, and
all three take twice as long as that to compile.  Nothing here imports torch before there is a
library to load: a start compiles while it imports torch and vLLM.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from attnres_serve import cache_folder
from attnres_serve.kernels import fingerprint
from attnres_serve.kernels.interface import BackendError

SOURCES = Path(__file__).parent
# As vectors.h has them.
KERNELS = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
_AHEAD: threading.Thread | None = None  # that compiles, in the process that began it
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fno-math-errno")


def path(dtype: str | None = None) -> Path:
    """Where a library of this source, torch, Python and processor is, or will be.

    That is in ``~/.cache/attnres_serve`` (``$XDG_CACHE_HOME/attnres_serve``), which is made.

    Args:
        dtype: one of ``KERNELS``, for the kernels; None for the operators.

    Raises:
        OSError: there is no such folder and none can be made.
    """
    return cache_folder.made() / f"cpp_{dtype or 'operators'}-{_fingerprint()}.so"


def compile_ahead(dtype: str) -> None:
    """Begin to compile what a model needs in a thread of this process, where it is not there yet.

    Whoever loads it meanwhile waits for it.  A failure is not reported here: ``load`` tries again.

    Args:
        dtype: of its activations; only time is lost if it is another one or none of ``KERNELS``.
    """
    global _AHEAD
    libraries = (None, dtype) if dtype in KERNELS else (None,)
    with suppress(OSError):
        if any(not path(one).exists() for one in libraries):
            _AHEAD = threading.Thread(target=_compile_once, args=libraries, daemon=True)
            _AHEAD.start()


def load(dtype: str | None = None) -> Path:
    """Load a library, compiling it where there is none that can be loaded.

    Only that takes the lock.  A library moves to its place in one piece, and one that can be loaded
    is never replaced: a process that loaded a copy of what it has loaded already would crash.

    Args:
        dtype: as ``path`` takes it.  Kernels are loaded after the operators.

    Returns:
        Its path.

    Raises:
        BackendError: there is no C++ compiler, or it failed; the message has its reason.
        OSError: the cache cannot be written.
    """
    library = path(dtype)
    if _loads(library):
        return library
    if _AHEAD is not None:
        _AHEAD.join()  # at once in a fork, which has no such thread; the lock is of processes
    with _locked(library):
        if not _loads(library):  # another process has not just made it
            _compile(library, dtype)
            _load(library)
    return library


def _compile_once(*dtypes: str | None) -> None:
    for dtype in dtypes:
        with suppress(OSError, BackendError), _locked(library := path(dtype)):
            if not library.exists():
                _compile(library, dtype)


def _fingerprint() -> str:
    """Source, flags, torch, Python and processor: what compiled libraries depend on."""
    python = str(sys.implementation.cache_tag)
    sources = sorted({*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")})
    texts = [source.read_text() for source in sources]
    parts = [*texts, *FLAGS, version("torch"), python, platform.machine()]
    parts.append(fingerprint.processor())  # -march=native: a shared cache has one for each kind
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _loads(library: Path) -> bool:
    """Load the library, unless it is missing, damaged or made for other system libraries."""
    if not library.exists():
        return False
    try:
        _load(library)
    except OSError:
        return False
    return True


def _load(library: Path) -> None:
    import torch

    torch.ops.load_library(str(library))


@contextmanager
def _locked(library: Path) -> Iterator[None]:
    """One process at a time: workers that start together compile once.

    A lock that a fork does not inherit: it would keep the lock for as long as it lives.
    """
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _compile(library: Path, dtype: str | None) -> None:
    """Compile and move it here; whoever calls it holds the lock.

    Raises:
        BackendError: there is no C++ compiler, or it failed; the message has its reason.
    """
    compiler = os.environ.get("CXX", "c++")
    try:
        command = shlex.split(compiler)  # it may have a wrapper before it, and flags behind
    except ValueError:  # a quotation without an end
        command = []
    # The environment may have a compiler even if it is not activated.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    if not command or not shutil.which(command[0], path=path):
        raise BackendError(
            f"the C++ backend could not be compiled, there is no {compiler!r} on the path; install "
            "a C++ compiler such as g++, or choose the torch backend."
        )
    torchs = Path(str(getattr(find_spec("torch"), "origin", ""))).parent
    headers = torchs / "include", sysconfig.get_path("include", "posix_prefix")
    source = SOURCES / ("kernels.cpp" if dtype else "operators.cpp")
    defined = (f"-DDTYPE={KERNELS[dtype]}",) if dtype else ()
    sources = *(f"-I{folder}" for folder in headers), *defined, str(source)
    links = f"-L{torchs / 'lib'}", "-ltorch_cpu", "-lc10"
    for left in library.parent.glob(f"{library.stem}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}-", dir=library.parent) as build:
        built = Path(build) / library.name
        done = subprocess.run(
            [*command, *FLAGS, "-shared", "-fPIC", *sources, *links, "-o", str(built)],
            env=os.environ | {"PATH": path, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not built.exists():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            reason = next((line for line in lines if " error: " in line), lines[-1])
            raise BackendError(
                f"the C++ backend could not be compiled by {compiler!r} ({reason.strip()}); mend "
                "that or set CXX to another C++ compiler, or choose the torch backend."
            )
        os.replace(built, library)
