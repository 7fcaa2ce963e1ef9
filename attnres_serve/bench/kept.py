"""Compiled code that stays for the next run of ``bench`` on a checkpoint.

vLLM finds compiled code by the path of a model, too.  So the baseline has the same path each time,
although its weights are written anew and end with the run.  Stock vLLM does not look at the
processor, which may be another where machines share a home.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from attnres_serve import cache_folder
from attnres_serve.errors import SettingError
from attnres_serve.kernels import fingerprint


@contextmanager
def caches(checkpoint: Path) -> Iterator[tuple[Path, Path]]:
    """The folder of a checkpoint's compiled code, and one for its baseline, which is not there yet.

    Another run on the same checkpoint is waited for.

    Args:
        checkpoint: its folder.

    Raises:
        SettingError: there is no place for them.
    """
    machine = fingerprint.processor(), os.environ.get("ATEN_CPU_CAPABILITY")
    name = sha256(f"{checkpoint.resolve()} {machine}".encode()).hexdigest()[:16]
    try:
        folder = cache_folder.made(f"bench/{name}")
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise SettingError(
            f"bench has no place for compiled code ({error}); set XDG_CACHE_HOME to a folder that "
            "can be written."
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        twin = folder / "twin"
        shutil.rmtree(twin, ignore_errors=True)  # of a run that was killed
        try:
            yield folder, twin
        finally:
            shutil.rmtree(twin, ignore_errors=True)
